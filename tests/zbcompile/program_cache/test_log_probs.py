"""Log-probabilities of labels equal log_softmax and gather of the unsplit model: bit by bit, with a
sharded output layer within 1e-6 of the largest entry."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.pool import Pool
from tests.support.vocabulary_training import distance

LENGTH, WORDS = 6, 37


class Capped(nn.Module):
    """A soft cap and a temperature, as the model has them, and words that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.2))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": 4 * torch.tanh(self.head(self.body(self.table(tokens))) / 4) / 0.7}


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = torch.randint(WORDS, (2, rows, LENGTH), generator=generator)
    labels[0, 1] = labels[-1, :] = -100
    return tokens, labels


def made(model: nn.Module, loss: Any = loss_of, **options: Any) -> zbcompile.Pipeline:
    ranks = None if dist.is_initialized() else 2
    options = {"schedule": "zb-h1", "microbatches": 4, "ranks": ranks, "loss": loss, **options}
    return zbcompile.pipeline(model, **options)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens)["logits"]  # type: ignore[no-any-return]


def eager(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    normal = torch.log_softmax(logits_of(model, tokens), -1)
    results = normal.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == -100, 0.0, results)


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    tokens, _ = batch_of(8)
    return made(Capped()).compile(tokens, target=tokens)


@pytest.mark.slow
def test_bits_of_the_unsplit_model(pipe: zbcompile.Pipeline) -> None:
    """Of a batch whose last microbatch is smaller, and microbatches of two shapes."""
    tokens, labels = batch_of(7)
    ours = pipe.log_probs(tokens, labels=labels)
    assert torch.equal(ours, eager(Capped(), tokens, labels))
    assert not ours.requires_grad
    tokens, labels = batch_of(8)
    split: Any = [((tokens[:2],), {}, labels[:2]), ((tokens[2:4, :3],), {}, labels[2:4, :3])]
    for ours, ((part,), _, target) in zip(pipe.log_probs(microbatches=split), split, strict=True):
        assert torch.equal(ours, eager(Capped(), part, target))


@pytest.mark.slow
def test_what_is_refused_says_why_in_one_line(pipe: zbcompile.Pipeline) -> None:
    tokens, labels = batch_of(8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"labels": labels[:, :3]}, r"labels= is int64\[8, 3\] and the logits are \[8, 6, 37\]"),
        ({"labels": labels.float()}, "labels= is float32"),
        ({}, "labels= is NoneType"),
        ({"labels": (labels % 256).to(torch.uint8)}, "labels= holds 156"),  # no -100 in eight bits
        ({"labels": labels + 36}, "the output layer has 37 words; expected 0 to 36, or -100"),
        ({"labels": labels, "outputs": "first"}, "outputs='first'"),
        ({"labels": labels, "microbatches": 0}, "microbatches=0"),
    ]
    for arguments, reason in wrong:
        with pytest.raises(zbcompile.PipelineError, match=reason) as raised:
            pipe.log_probs(tokens, **arguments)
        assert "\n" not in str(raised.value)
    with pytest.raises(zbcompile.PipelineError, match="got no inputs besides labels="):
        pipe.log_probs(labels=labels)


class Odd(nn.Module):
    """Returns something that is no logits: numbers of classes, or another name."""

    def __init__(self, classes: bool) -> None:
        super().__init__()
        self.layers, self.classes = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), classes

    def forward(self, x: Tensor) -> Any:
        x = self.layers(x)
        return x.argmax(-1) if self.classes else {"score": x}


def test_an_output_without_logits() -> None:
    x, labels = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    for classes, reason in ((True, r"int64\[4\], which is no logits"), (False, "without logits")):
        with pytest.raises(zbcompile.CompileError, match=reason):
            made(Odd(classes).requires_grad_(False), None).log_probs(x, labels=labels)
    reason = "without logits.*An evaluation before the first"
    with pytest.raises(zbcompile.CompileError, match=reason):
        made(Odd(False), F.mse_loss, vocab=1).eval(x)


def sharded(vocab: int, frozen: bool) -> list[float]:
    """The largest differences from eager: of log-probabilities from the shards, of all logits, for
    which the rows are gathered, and of a step; nothing was compiled before, or the step."""
    model, (tokens, labels) = Capped(), batch_of(8)
    pipe = made(model, vocab=vocab)
    model.requires_grad_(not frozen)
    if vocab == 2:
        pipe.compile(tokens, target=tokens)
    pipe.record = True
    ours = pipe.log_probs(tokens, labels=labels)
    assert pipe.last_step is not None
    assert "S" in pipe.last_step.schedule.ops
    logits = pipe.eval(tokens)["logits"]
    assert "S" not in pipe.last_step.schedule.ops
    assert {parameter.requires_grad for parameter in pipe.parameters()} == {not frozen}
    pairs = [(ours, eager(Capped(), tokens, labels)), (logits, logits_of(Capped(), tokens))]
    model.requires_grad_(True)
    expected = eager_step(Capped(), loss_of, Batch((tokens,), {}, tokens), 4, 0)
    pairs.append((pipe.step(tokens, target=tokens), expected))
    assert "T" in pipe.program.schedule.ops  # what was placed before trains from its shards
    return [distance(one, other) for one, other in pairs]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("vocab", "frozen"), [(1, True), (2, False), (1, False)])
def test_from_shards_of_the_output_layer(vocab: int, frozen: bool) -> None:
    assert max(sharded(vocab, frozen)) <= 1e-6


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_from_shards_in_processes(pool: Pool) -> None:
    assert max(max(item) for item in pool.run(sharded, 1, True)) <= 1e-6
