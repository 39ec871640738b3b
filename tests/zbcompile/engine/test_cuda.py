"""On CUDA: the same gradients, and a host that never waits. Skipped, with the reason, where there
are too few GPUs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from tests.support.on_gpus import one_gpu, two_gpus, waiting_forbidden
from tests.support.oracle import PROBLEMS, Batch, eager_step
from tests.support.pool import Pool

# float32 GEMMs of another shape or order: 2^-23 per addition, some hundred of them. TF32 is off by
# default.
BOUND = 1e-4


def assert_steps_as_eager(
    problem: str,
    schedule: str,
    ranks: int | None,
    device: torch.device,
    vocab: str | int = "off",
    backend: Any = "fx",
) -> None:
    chosen, microbatches = PROBLEMS[problem], 8
    batches = chosen.batches(3, 2 * microbatches)
    model, twin = chosen.model().to(device), chosen.model().to(device)
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "ranks": ranks}
    exact = vocab == "off"
    pipe = zbcompile.pipeline(
        model, loss=chosen.loss, exact=exact, vocab=vocab, backend=backend, **options
    )
    for step, batch in enumerate(batches):
        moved = on_device(batch, device)
        with waiting_forbidden() if step else nullcontext():  # the first step compiles
            loss = pipe.step(*moved.args, target=moved.target)
        assert_near(loss, eager_step(twin, chosen.loss, moved, microbatches, step))
    assert_gradients_as(pipe, dict(twin.named_parameters()))
    pipe.close()


def assert_gradients_as(pipe: zbcompile.Pipeline, expected: dict[str, torch.nn.Parameter]) -> None:
    """Also of the rows of a sharded vocabulary that are here, of which ranks need not hold equally
    many."""
    sharded = pipe.program.vocabulary
    for name, parameter in pipe.named_parameters():
        full = expected[name].grad
        assert full is not None
        if parameter.shape != full.shape:
            assert sharded is not None
            begin, end = sharded.bounds[dist.get_rank()]
            full = full[begin:end]
        assert_near(parameter.grad, full)


def on_device(batch: Batch, device: torch.device) -> Batch:
    assert batch.target is not None
    return Batch(tuple(tensor.to(device) for tensor in batch.args), {}, batch.target.to(device))


def assert_near(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert ours is not None
    assert theirs is not None
    assert ours.is_cuda
    assert (ours - theirs).abs().max() <= BOUND * theirs.abs().max()


@one_gpu
def test_in_one_process() -> None:
    assert_steps_as_eager("small-tied", "zb-v", 2, torch.device("cuda", 0))


def rank_of_two(schedule: str, vocab: str | int = "off") -> None:
    device = torch.device("cuda", dist.get_rank())
    assert_steps_as_eager(
        "small-dropout" if vocab == "off" else "small-tied", schedule, None, device, vocab
    )


@two_gpus
@pytest.mark.parametrize(("schedule", "backend"), [("zb-v", "nccl"), ("dualpipe-v", "nccl, bound")])
def test_two_processes_over_nccl(pool: Pool, schedule: str, backend: str) -> None:
    """Also in a group that is bound to its device, whose pairs share one communicator."""
    pool.run(rank_of_two, schedule, backend=backend)


@two_gpus
def test_sharded_vocabulary_over_nccl(pool: Pool) -> None:
    """Its collectives have a separate group and stream."""
    pool.run(rank_of_two, "zb-v", 1, backend="nccl")


def two_on_one_gpu() -> None:
    with pytest.raises(zbcompile.PipelineError, match="ranks 0 and 1 use the same GPU"):
        zbcompile.pipeline(PROBLEMS["mlp"].model().to("cuda:0"), schedule="1f1b", microbatches=2)


@two_gpus
def test_two_ranks_on_one_gpu_are_refused(pool: Pool) -> None:
    pool.run(two_on_one_gpu, backend="nccl")
