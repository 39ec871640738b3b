"""On CUDA: the same gradients, and a host that never waits. Skipped, with the reason, where there
are too few GPUs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.on_gpus import one_gpu, two_gpus, waiting_forbidden
from tests.support.oracle import PROBLEMS, Batch, eager_step
from tests.support.pool import Pool

# float32 GEMMs of another shape or order: 2^-23 per addition, some hundred. TF32 is off by default.
BOUND = 1e-4


def step_as_eager(problem: str, schedule: str, ranks: int | None, **options: Any) -> None:
    """Also of the rows of a sharded vocabulary that are here, of which ranks need not hold equally
    many."""
    chosen, count = PROBLEMS[problem], 4
    rank = dist.get_rank() if ranks is None else 0
    device = torch.device("cuda", rank)
    model, twin = chosen.model().to(device), chosen.model().to(device)
    options = {"schedule": schedule, "microbatches": count, "ranks": ranks, "exact": True} | options
    pipe = zbcompile.pipeline(model, loss=chosen.loss, **options)
    for step, batch in enumerate(chosen.batches(2, 2 * count)):
        moved = Batch((batch.args[0].to(device),), {}, batch.target.to(device))  # type: ignore[union-attr]
        with waiting_forbidden() if step else nullcontext():  # the first step compiles
            loss = pipe.step(*moved.args, target=moved.target)
        expected = eager_step(twin, chosen.loss, moved, count, step)
        torch.testing.assert_close(loss, expected, rtol=BOUND, atol=0)
    sharded = pipe.program.vocabulary
    for name, parameter in pipe.named_parameters():
        gradient, full = parameter.grad, twin.get_parameter(name).grad
        assert gradient is not None
        assert full is not None
        full = full if gradient.shape == full.shape else full[slice(*sharded.bounds[rank])]  # type: ignore[union-attr]
        assert (gradient - full).abs().max() <= BOUND * full.abs().max(), name
        assert gradient.is_cuda
    pipe.close()


@one_gpu
def test_in_one_process() -> None:
    step_as_eager("small-tied", "zb-v", 2)


def two_ranks(schedule: str, vocab: str | int) -> None:
    problem = "small-dropout" if vocab == "off" else "small-tied"
    step_as_eager(problem, schedule, None, vocab=vocab, exact=vocab == "off")


@two_gpus
@pytest.mark.parametrize(
    ("schedule", "backend", "vocab"), [("dualpipe-v", "nccl, bound", "off"), ("zb-v", "nccl", 1)]
)
def test_two_processes_over_nccl(pool: Pool, schedule: str, backend: str, vocab: str | int) -> None:
    """Also in a group that is bound to its device, whose pairs share one communicator; the
    collectives of a sharded vocabulary have a separate group and stream."""
    pool.run(two_ranks, schedule, vocab, backend=backend)


def two_on_one_gpu() -> None:
    with pytest.raises(zbcompile.PipelineError, match="ranks 0 and 1 use the same GPU"):
        zbcompile.pipeline(PROBLEMS["mlp"].model().to("cuda:0"), schedule="1f1b", microbatches=2)


@two_gpus
def test_two_ranks_on_one_gpu_are_refused(pool: Pool) -> None:
    pool.run(two_on_one_gpu, backend="nccl")
