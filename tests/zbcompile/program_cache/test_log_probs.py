"""Log-probabilities of labels equal log_softmax and gather of the unsplit model: bit by bit, with a
sharded output layer within 1e-6 of the largest entry."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, VOCABULARY, next_byte_loss
from tests.support.pool import Pool
from tests.support.vocabulary_training import distance

LENGTH = 6


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=16, heads=2, length=LENGTH, dropout=0.2, tied=True)


class Capped(nn.Module):
    """A soft cap and a temperature, as the model has them, and a vocabulary that does not
    divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.body = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)
        )

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {
            "logits": 4 * torch.tanh(self.head(torch.tanh(self.body(self.table(tokens)))) / 4) / 0.7
        }


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def batch_of(rows: int, words: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(rows)
    tokens, labels = torch.randint(words, (2, rows, LENGTH), generator=generator)
    labels[0, 1] = labels[-1, :] = -100
    return tokens, labels


def eager(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the unsplit model."""
    model.eval()
    with torch.no_grad():
        output = model(tokens)
    model.train()
    normal = torch.log_softmax(output if isinstance(output, Tensor) else output["logits"], -1)
    results = normal.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == -100, 0.0, results)


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    built = zbcompile.pipeline(
        gpt(), schedule="zb-h1", microbatches=4, ranks=2, loss=next_byte_loss
    )
    tokens, _ = batch_of(8)
    return built.compile(tokens, target=tokens)


@pytest.mark.slow
def test_labels_of_a_small_type(pipe: zbcompile.Pipeline) -> None:
    """In eight bits -100 would be 156."""
    tokens, _ = batch_of(8)
    labels = tokens.to(torch.uint8)
    labels[0, 0] = 156
    assert torch.equal(pipe.log_probs(tokens, labels=labels), eager(gpt(), tokens, labels.long()))


@pytest.mark.slow
def test_split_microbatches(pipe: zbcompile.Pipeline) -> None:
    """Microbatches of two shapes flow through one run."""
    tokens, labels = batch_of(8)
    split = [
        ((tokens[:2],), {}, labels[:2]),
        ((tokens[2:4, :3],), {}, labels[2:4, :3]),
        ((tokens[4:6],), {}, labels[4:6]),
    ]
    for ours, ((part,), _, target) in zip(pipe.log_probs(microbatches=split), split, strict=True):
        assert torch.equal(ours, eager(gpt(), part, target))


@pytest.mark.slow
def test_bits_of_the_unsplit_model(pipe: zbcompile.Pipeline) -> None:
    """A batch that divides, and one whose last microbatch is smaller."""
    for rows in (8, 7):
        tokens, labels = batch_of(rows)
        ours, theirs = pipe.log_probs(tokens, labels=labels), eager(gpt(), tokens, labels)
        assert torch.equal(ours, theirs)
        assert not ours[labels == -100].any()
        assert not ours.requires_grad


@pytest.mark.slow
def test_what_is_refused_says_why_in_one_line(pipe: zbcompile.Pipeline) -> None:
    tokens, labels = batch_of(8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"labels": labels[:, :3]}, r"labels= is int64\[8, 3\] and the logits are \[8, 6, 256\]"),
        ({"labels": labels.float()}, "labels= is float32"),
        ({}, "labels= is NoneType"),
        (
            {"labels": labels + 255},
            "and the output layer has 256 words; expected 0 to 255, or -100",
        ),
        ({"labels": labels, "outputs": "first"}, "outputs='first'"),
        ({"labels": labels, "microbatches": 0}, "microbatches=0"),
    ]
    pipe.log_probs(tokens, labels=labels)
    saved = len(pipe._compiled.evaluations.entries)
    for arguments, reason in wrong:
        with pytest.raises(
            (zbcompile.PipelineError, zbcompile.CompileError), match=reason
        ) as raised:
            pipe.log_probs(tokens, **arguments)
        assert "\n" not in str(raised.value)
    with pytest.raises(zbcompile.PipelineError, match="got no inputs besides labels="):
        pipe.log_probs(labels=labels)
    assert len(pipe._compiled.evaluations.entries) == saved


class Odd(nn.Module):
    """Returns something that is no logits."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.make = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layers(x))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda y: y.argmax(-1), r"returned int64\[4\], which is no logits"),
        (lambda y: {"score": y}, "without logits"),
    ],
    ids=["numbers", "another name"],
)
def test_an_output_without_logits(make: Callable[[Tensor], Any], reason: str) -> None:
    frozen = zbcompile.pipeline(
        Odd(make).requires_grad_(False), schedule="1f1b", microbatches=2, ranks=2
    )
    with pytest.raises(zbcompile.CompileError, match=reason):
        frozen.log_probs(torch.randn(4, 4), labels=torch.zeros(4, dtype=torch.int64))


def sharded(kind: str, vocab: int, frozen: bool) -> list[float]:
    """The largest differences from eager: of log-probabilities from the shards, and of all logits,
    for which the rows are gathered."""
    model, words, loss = (
        (gpt(), VOCABULARY, next_byte_loss) if kind == "tied" else (Capped(), 37, loss_of)
    )
    ranks = None if dist.is_initialized() else 2
    built = zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=4, ranks=ranks, loss=loss, vocab=vocab
    )
    tokens, labels = batch_of(8, words)
    model.requires_grad_(not frozen)
    if not frozen:
        built.compile(tokens, target=tokens)
    built.record = True
    ours = built.log_probs(tokens, labels=labels)
    assert built.last_step is not None
    assert "S" in built.last_step.schedule.ops
    logits = built.eval(tokens)
    assert "S" not in built.last_step.schedule.ops
    built.record = False
    assert [parameter.requires_grad for parameter in built.parameters()] == [not frozen] * len(
        list(built.parameters())
    )
    model.requires_grad_(True)
    built.step(tokens, target=tokens)
    assert "T" in built.program.schedule.ops  # what was placed frozen trains from its shards
    assert all(parameter.requires_grad for parameter in built.parameters())
    reference = gpt() if kind == "tied" else Capped()
    theirs = eager(reference, tokens, labels)
    full = (
        reference.eval()(tokens).detach()
        if kind == "tied"
        else reference(tokens)["logits"].detach()
    )
    results = [ours, logits if kind == "tied" else logits["logits"]]
    return [distance(a, b) for a, b in zip(results, (theirs, full), strict=True)]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("kind", "vocab", "frozen"), [("capped", 2, False), ("capped", 1, True), ("tied", 1, True)]
)
def test_from_shards_of_the_output_layer(kind: str, vocab: int, frozen: bool) -> None:
    assert max(sharded(kind, vocab, frozen)) <= 1e-6


@pytest.mark.slow
def test_from_shards_in_processes(pool: Pool) -> None:
    assert max(max(item) for item in pool.run(sharded, "tied", 1, True)) <= 1e-6
