"""A sharded output layer trains as the unsplit model does: in one process, over gloo, in replicas; its
rows are parameters like others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import next_byte_loss
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.vocabulary_training import (
    MODELS,
    VocabularyCase,
    assert_equal_within,
    batches_of,
    distance,
    eager,
    join,
    model_of,
    sharded,
)
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError

RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        VocabularyCase("gpt-options", "zb-h1", 2, 2),
        VocabularyCase("gpt", "1f1b", 1, 1),
        VocabularyCase("gpt-options", "dualpipe-v", 2, 2),
        VocabularyCase("gpt-options", "zb-v", 1, 3, 6),
    ],
    ids=str,
)
def test_in_one_process(case: VocabularyCase) -> None:
    """Under "interlaced": test_programs.py; models of transformers:
    `examples/benchmarks/vocab_sweep.py`."""
    assert_equal_within(sharded(case), eager(case), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        VocabularyCase("gpt-tied", "1f1b", 1, 2),
        pytest.param(VocabularyCase("gpt-tied", "1f1b", 2, 2, 8, replicas=2), marks=RARE),
    ],
    ids=str,
)
def test_in_processes(case: VocabularyCase, pool: Pool) -> None:
    """Two replicas train as one on the concatenated batch: the rows of a tied weight are reduced
    once, after the lookups have been added."""
    shares, expected = pool.run(sharded, case, ranks=case.ranks * case.replicas), eager(case)
    for first in range(0, len(shares), case.ranks):
        assert_equal_within(join(shares[first : first + case.ranks]), expected, 1e-12)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32, bias=False))


def updated() -> bool:
    """Returns whether the model of a single pipeline rank has the values of a ZeRO-1 update."""
    model = words()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "vocab": 1}
    pipe = zbcompile.pipeline(model, mesh=mesh_of(pp=1, dp=2), loss=next_byte_loss, **options)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, zero=1)
    tokens = torch.arange(32).view(4, 8)
    pipe.step(tokens, target=tokens)
    optimizer.step()
    state = pipe.state_dict(full=True)
    return all(
        torch.equal(p, state[name]) and not torch.equal(p, before[name])
        for name, p in model.named_parameters()
    )


@pytest.mark.slow
def test_zero1_moves_the_rows_of_a_single_rank_with_the_model(pool: Pool) -> None:
    assert all(pool.run(updated, ranks=2))


def test_what_cannot_be_is_refused() -> None:
    case = VocabularyCase("gpt", "1f1b", 1, 2)
    batch = batches_of(case)[0]
    for options, reason in (
        ({"vocab": 3}, "vocab=3; expected"),
        ({"vocab": 1, "exact": True}, "exact=True cannot use it"),
        ({"vocab": 1, "loss": lambda y, goal: y.square().mean()}, "vocab=1: .*Use vocab=.off"),
    ):
        arguments = {"loss": MODELS["gpt"][1], "schedule": "1f1b", "microbatches": 4} | options
        with pytest.raises((CompileError, PipelineError), match=reason):
            zbcompile.pipeline(model_of(case), ranks=2, **arguments).compile(
                *batch.args, target=batch.target
            )


def fill(name: str, tensor: Tensor) -> None:
    tensor.normal_(std=0.2)


def on_meta() -> dict[str, Any]:
    """Returns what a step of a model from the meta device has made."""
    with torch.device("meta"):
        model = words()
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "init": fill, "vocab": 1}
    options["ranks"] = None if dist.is_initialized() else 2
    pipe = zbcompile.pipeline(model, loss=next_byte_loss, **options)
    tokens = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(1))
    loss = pipe.step(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous())
    head = pipe.state_dict()["2.weight"]
    return {
        "loss": loss,
        "gradients": {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None},
        "state": dict(pipe.state_dict(full=True)),
        "shapes": (*head.shape, *getattr(head, "_local_tensor", head).shape),
        "real": {name for name, p in model.named_parameters() if not p.is_meta},
    }


@pytest.mark.slow
def test_a_rank_makes_its_own_rows_real(pool: Pool) -> None:
    """Only a rank's rows, DTensors in the state dict, get memory, with the values that the whole
    parameter would have; gradients are those of one process with all ranks."""
    alone, seen = on_meta(), pool.run(on_meta)
    for item in seen:
        assert item["shapes"] == (32, 8, 16, 8)
        assert not {"0.weight", "2.weight"} & item["real"]
        assert distance(item["loss"], alone["loss"]) < 1e-6
        assert all(torch.equal(item["state"][name], full) for name, full in alone["state"].items())
    for name, gradient in alone["gradients"].items():
        parts = [item["gradients"][name] for item in seen if name in item["gradients"]]
        joined = torch.cat(parts) if len(parts) == 2 else parts[0]
        assert distance(joined, gradient) < 1e-6, name


WORDS, WIDTH = 24, 8
MICROBATCHES = 5  # a fifth has more digits than bfloat16


class TwoHeads(nn.Module):
    """Predicts the next word and the one after it by one output layer; `gate` gets its gradient
    from a number alone."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Parameter(torch.tensor([1.7, -0.3]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, balance = self.embedding(tokens[:, :-2]), torch.zeros(())
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            balance = balance + hidden.float().square().mean()
        logits, later = self.head(hidden), self.head(hidden.sin()[:, :-1])
        first = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
        further = F.cross_entropy(later.flatten(0, 1), tokens[:, 2:-1].flatten())
        return first + 0.3 * further + 0.01 * balance + (self.gate * 3).sum()


@pytest.mark.slow
@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("vocab", "schedule", "bias"),
    [(1, "zb-h1", False), (2, "zb-v", True), (1, "dualpipe-v", False)],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-2), (torch.float32, 1e-6)])
def test_terms_of_the_loss(
    vocab: int, schedule: str, bias: bool, dtype: torch.dtype, bound: float
) -> None:
    """A float32 term keeps its digits next to an output layer in bfloat16, and so does its
    gradient. An evaluation has all terms."""
    model, ours = (TwoHeads(bias).to(dtype) for _ in range(2))
    for item in (model, ours):
        item.gate.data = item.gate.data.float()
    tokens = torch.randint(WORDS, (2 * MICROBATCHES, 9))
    expected = torch.stack(
        [model(part) / MICROBATCHES for part in tokens.chunk(MICROBATCHES)]
    ).sum()
    expected.backward()
    options = {"schedule": schedule, "ranks": 2, "microbatches": MICROBATCHES, "vocab": vocab}
    pipe = zbcompile.pipeline(ours, **options)
    loss = pipe.step(tokens)
    assert loss.item() == pytest.approx(expected.item(), rel=max(1e-6, bound / 10))
    assert pipe.eval(tokens).item() == pytest.approx(expected.item(), rel=max(1e-6, bound / 10))
    for name, parameter in pipe.named_parameters():
        full = model.get_parameter(name).grad
        limit = 1e-6 if name == "gate" else bound
        assert (parameter.grad - full).abs().max() <= limit * full.abs().max(), name  # type: ignore[operator,union-attr]
