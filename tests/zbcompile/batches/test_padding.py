"""Batches of many lengths compile few programs."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zbcompile


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def longest(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, labels = zip(*samples, strict=True)
    padded = nn.utils.rnn.pad_sequence(list(labels), batch_first=True, padding_value=-100)
    return nn.utils.rnn.pad_sequence(list(tokens), batch_first=True), padded


@pytest.mark.slow
def test_a_loader_of_seven_lengths_compiles_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """The padding counts in no loss: the losses are those of the batches without it."""
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 3, 4, 5, 6, 7, 8]
    data = [(torch.randint(7, (n,), generator=generator), torch.randint(3, (n,), generator=generator)) for n in lengths]
    samples = [sample for sample in data for _ in range(2)]
    fit = zbcompile.buckets((4, 8), {"0": 0, "1": -100}, collate=longest)
    model = Tagger()
    pipe = zbcompile.pipeline(model, schedule="1f1b", ranks=2, microbatches=2, loss=loss, loss_reduction="sum")
    for i, (tokens, labels) in enumerate(DataLoader(samples, batch_size=2, collate_fn=fit)):
        assert tokens.shape[1] in (4, 8)
        plain = longest(samples[2 * i : 2 * i + 2])
        torch.testing.assert_close(pipe.step(tokens, target=labels), loss(model(plain[0]), plain[1]).detach())
    assert capsys.readouterr().out.count("compiling again") == 1


def test_what_cannot_be_padded_is_refused() -> None:
    batch = {"input_ids": torch.ones(2, 5), "labels": torch.ones(2, 5), "weight": torch.ones(2, 1), "name": "a"}
    with pytest.raises(zbcompile.PipelineError, match=r"labels, of shape \[2, 5\], has length 5 like"):
        zbcompile.buckets((8,), {"input_ids": 0})(batch)
    with pytest.raises(zbcompile.PipelineError, match="a batch of length 5, and the longest bucket is 4"):
        zbcompile.buckets((4, 2), {"input_ids": 0, "labels": -100})(batch)
    with pytest.raises(zbcompile.PipelineError, match="pad= names 'tokens', but the batch has input_ids, labels, "):
        zbcompile.buckets((8,), {"tokens": 0})(batch)
    with pytest.raises(zbcompile.PipelineError, match="expected at least one length"):
        zbcompile.buckets((), {})
    fitted = zbcompile.buckets((8,), {"input_ids": 0, "labels": -100})(batch)
    assert [fitted[name].shape[1] for name in ("input_ids", "labels", "weight")] == [8, 8, 1]


class Pair(NamedTuple):
    tokens: Tensor
    weight: Tensor


X = {"x": torch.ones(1, 6)}
WRONG: list[tuple[dict[str, Any], Any, str]] = [
    *(
        ({"lengths": given}, X, "lengths=.*; expected at least one length")
        for given in (8, "48", (4.5, 8), (True,), ())
    ),
    *(({"pad": given}, X, "pad=.*; expected a number, or None") for given in (["x"], {"x": "0"})),
    ({"dim": 1.0}, X, "dim=1.0; expected a whole number"),
    *(({}, batch, "expected a mapping, a tuple or a list") for batch in (None, torch.ones(1, 6))),
    ({}, {"x": [1, 2]}, "x is a list; expected a tensor"),
    ({}, {"x": torch.ones(6)}, r"x has shape \[6\], which has no dimension 1"),
    ({"dim": 5}, X, "no dimension 5"),
    ({"dim": -1}, {"x": torch.tensor(1.0)}, "no dimension -1"),
    ({"pad": {"x": -0.5}}, {"x": torch.ones(1, 6).long()}, "gives -0.5 for x, whose dtype torch.int64 has no such"),
    ({"pad": {"x": float("nan")}}, {"x": torch.ones(1, 6).long()}, "gives nan for x"),
    ({"pad": {"x": -100}}, {"x": torch.ones(1, 6).bool()}, "gives -100 for x, whose dtype torch.bool"),
    ({"pad": {"x": -100}}, {"x": torch.ones(1, 6).byte()}, "gives -100 for x, whose dtype torch.uint8"),
    ({}, {**X, "mask": torch.ones(1, 1, 6, 6)}, "mask, of shape .* has length 6 like .* or with None"),
    ({}, {**X, "pos": torch.arange(6)}, "pos, of shape"),
    ({}, {**X, "more": {"mask": torch.ones(1, 6)}}, "more.mask, of shape .* does not name more"),
]


@pytest.mark.parametrize(("options", "batch", "says"), WRONG)
def test_wrong_options_and_batches_are_one_kind_of_error(options: dict[str, Any], batch: Any, says: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=f"^buckets: .*{says}"):
        zbcompile.buckets(**{"lengths": (4, 8), "pad": {"x": 0}, **options})(batch)


def test_a_tensor_may_stay_and_the_batch_keeps_its_type() -> None:
    """None for one that is as long by coincidence; rows that are as many as the length are no length."""
    batch = UserDict({"x": torch.ones(3, 3), "pixels": torch.ones(3, 3, 5, 5), "scores": torch.ones(3)})
    fitted = zbcompile.buckets((4,), {"x": 0, "pixels": None})(batch)
    assert type(fitted) is UserDict
    assert [fitted["x"].shape, fitted["pixels"].shape, batch["x"].shape] == [(3, 4), (3, 3, 5, 5), (3, 3)]
    pair = zbcompile.buckets((4,), {"0": 0})(Pair(torch.ones(2, 3), torch.ones(2, 1)))
    assert (type(pair), pair.tokens.shape) == (Pair, (2, 4))
    assert type(zbcompile.buckets((4,), {"0": 0})([torch.ones(2, 3)])) is list
