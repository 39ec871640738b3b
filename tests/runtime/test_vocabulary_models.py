"""transformers' models with their output layers sharded: gradients of the unsplit model, in one process and over gloo.

Llama untied, GPT-2 and BERT (masked LM) tied, Gemma-2 tied with a soft cap.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from tests.oracle import Gradients, eager_step
from tests.runtime.pool import Pool
from tests.runtime.vocabulary_training import distance
from tests.zoo import ZOO

MICROBATCHES = 4


@dataclass(frozen=True)
class ModelCase:
    """One step of a model of the zoo."""

    model: str
    schedule: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} ranks={self.ranks}"


CASES = (
    ModelCase("llama", "1f1b", 2),
    ModelCase("gpt2", "zb-v", 2),
    ModelCase("gemma2", "zb-h1", 2),
    ModelCase("bert", "dualpipe-v", 2),
)


def dtype_of(case: ModelCase) -> torch.dtype:
    """Eager mode makes NaN of Gemma-2 in double precision."""
    return torch.float32 if case.model == "gemma2" else torch.float64


def one_step(case: ModelCase) -> tuple[Tensor, Gradients]:
    """This process's share of the gradients, in double precision."""
    problem = ZOO[case.model]
    (batch,) = problem.batches(1, 2 * MICROBATCHES)
    pipe = zbcompile.pipeline(
        problem.model().to(dtype_of(case)),
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        ranks=None if dist.is_initialized() else case.ranks,
        vocab=1,
    )
    loss = pipe.step(*batch.args, **batch.kwargs)
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def unsplit(case: ModelCase) -> tuple[Tensor, Gradients]:
    problem = ZOO[case.model]
    model = problem.model().to(dtype_of(case))
    (batch,) = problem.batches(1, 2 * MICROBATCHES)
    loss = eager_step(model, None, batch, MICROBATCHES, 0)
    return loss, {name: p.grad for name, p in model.named_parameters()}


def assert_same(ours: tuple[Tensor, Gradients], theirs: tuple[Tensor, Gradients]) -> None:
    assert distance(ours[0], theirs[0]) < 1e-6  # these models compute their losses in fp32
    for name, gradient in theirs[1].items():
        found = ours[1][name]
        assert (found is None) == (gradient is None), name
        if gradient is not None and found is not None:
            noise = gradient.abs().max() < 1e-12  # the gradient of a key's bias is zero but for rounding
            assert noise or distance(found, gradient) < 2e-6, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_one_process(case: ModelCase) -> None:
    assert_same(one_step(case), unsplit(case))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_in_processes(case: ModelCase, pool: Pool) -> None:
    shares = pool.run(one_step, case, ranks=case.ranks)
    loss, whole = unsplit(case)
    joined: dict[str, Tensor | None] = {}
    for name, gradient in whole.items():
        parts = [grads[name] for _, grads in shares if grads.get(name) is not None]
        rows = gradient is not None and parts and parts[0].shape != gradient.shape
        joined[name] = torch.cat(parts) if rows else (parts[0] if parts else None)
    assert_same((shares[0][0], joined), (loss, whole))
