"""Batches of many lengths compile few programs."""

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
    with pytest.raises(zbcompile.PipelineError, match="labels has length 5 like the tensors of pad="):
        zbcompile.buckets((8,), {"input_ids": 0})(batch)
    with pytest.raises(zbcompile.PipelineError, match="a batch of length 5, and the longest bucket is 4"):
        zbcompile.buckets((4, 2), {"input_ids": 0, "labels": -100})(batch)
    with pytest.raises(zbcompile.PipelineError, match="pad= names 'tokens', but the batch has input_ids, labels, "):
        zbcompile.buckets((8,), {"tokens": 0})(batch)
    with pytest.raises(zbcompile.PipelineError, match="expected at least one length"):
        zbcompile.buckets((), {})
    fitted = zbcompile.buckets((8,), {"input_ids": 0, "labels": -100})(batch)
    assert [fitted[name].shape[1] for name in ("input_ids", "labels", "weight")] == [8, 8, 1]
