"""Two replicas of a pipeline train as one process does on the concatenated batch."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import PROBLEMS, eager_step
from tests.support.pool import Pool
from tests.support.replicated import (
    Gradients,
    in_one_process,
    mesh_of_replicas,
    replicated,
    replicated_in_half_precision,
    summed_in_single_precision,
)
from tests.support.training import Case, compile_for_forks, pipeline_of

# Replicas add up their own microbatches first: each of 24 additions rounds by at most 2^-24 of the
# sum so far, relative to the largest entry.
BOUND = 24 * 2.0**-24


def assert_near(ours: Gradients, theirs: Gradients) -> None:
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).abs().max() <= BOUND * theirs[name].abs().max(), name  # type: ignore[operator,union-attr]


RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "schedule", "reduction", "unsynchronised"),
    [
        ("small-tied", "zb-h1", "mean", 1),
        pytest.param("mlp", "zb-h1", "sum", 2, marks=RARE),
        pytest.param("small-tied", "dualpipe", "mean", 1, marks=RARE),
    ],
)
def test_gradients_are_those_of_the_concatenated_batch(
    problem: str, schedule: str, reduction: str, unsynchronised: int, pool: Pool
) -> None:
    compile_for_forks(Case(problem, schedule, 2, 4))
    runs = pool.run(replicated, problem, schedule, reduction, unsynchronised, ranks=4)
    expected = in_one_process(problem, reduction, unsynchronised + 2)
    for rank, run in enumerate(runs):
        losses = torch.stack(run.losses), torch.stack(expected.losses)
        torch.testing.assert_close(*losses, rtol=BOUND, atol=0)
        torch.testing.assert_close(run.norm, expected.norm, rtol=BOUND, atol=0)
        assert_near(run.gradients, expected.gradients)
        assert_near(run.clipped, expected.clipped)
        twin = runs[(rank + 2) % 4]
        assert all(torch.equal(run.gradients[name], twin.gradients[name]) for name in run.gradients)
    assert set().union(*(run.gradients for run in runs)) == expected.gradients.keys()


def buffers_and_half_precision() -> tuple[int, dict[str, Tensor], Gradients]:
    """Returns the number of this replica, its buffers after a step on its half of a batch, and the
    gradients of a bfloat16 model."""
    mesh = mesh_of_replicas()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    options = {"schedule": "1f1b", "microbatches": 2, "loss": nn.functional.mse_loss, "mesh": mesh}
    replica = mesh["dp"].get_local_rank()
    rows = torch.randn(2, 8, 4)[replica]
    zbcompile.pipeline(model, **options).step(rows, target=rows)
    return replica, dict(model.named_buffers()), replicated_in_half_precision()


@pytest.mark.slow
def test_buffers_are_the_first_replicas_and_half_precision_is_rounded_last(pool: Pool) -> None:
    """Buffers as with DistributedDataParallel. Sums over replicas are float32, so they differ from
    one float32 sum by the order of additions alone: about 1e-7, which turns the rounding to
    bfloat16 (8 bits) for one entry in some thousand, by one step."""
    results = sorted(pool.run(buffers_and_half_precision, ranks=2), key=lambda result: result[0])
    (_, first, _), (_, second, _) = results
    assert len(first) == 6
    assert all(torch.equal(second[name], buffer) for name, buffer in first.items())
    expected = summed_in_single_precision()
    for name, gradient in [item for *_, found in results for item in found.items()]:
        torch.testing.assert_close(gradient, expected[name], rtol=2.0**-7, atol=0, msg=name)
        assert (gradient != expected[name]).float().mean() <= 0.01, name


def test_clipping_counts_tied_parameters_once() -> None:
    """Bit for bit torch's norm of the whole model's gradients."""
    case = Case("small-tied", "1f1b", 2, 4)
    problem, pipe = PROBLEMS[case.problem], pipeline_of(case)
    model, batch = problem.model(), problem.batches(1, 8)[0]
    pipe.step(*batch.args, target=batch.target)
    norm = pipe.clip_grad_norm_(0.1)
    eager_step(model, problem.loss, batch, case.microbatches, 0)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    after = nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None])
    assert after == pytest.approx(0.1, rel=1e-5)


def step(pipe: zbcompile.Pipeline, count: int) -> float:
    parts = [torch.full((2, 2), float(number)) for number in range(count)]
    return float(pipe.step(microbatches=[((part,), {}, part) for part in parts]))


def differs_once() -> None:
    """One step in which replicas have other numbers of microbatches, between others."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh_of_replicas()
    options = {"schedule": "1f1b", "microbatches": 2, "loss": nn.functional.mse_loss}
    pipe = zbcompile.pipeline(model, mesh=mesh, **options)
    pipe.compile(torch.zeros(4, 2), target=torch.zeros(4, 2))
    pipe.optimizer(torch.optim.SGD, lr=0.1, overlap=True)
    first = step(pipe, 2)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    replica, says = (
        pipe.ranks.mesh.index("dp"),
        "the number of microbatches is 2 on rank 0 and 4 on",
    )
    with pytest.raises(zbcompile.PipelineError, match=says):
        step(pipe, (2, 4)[replica])
    with pytest.raises(zbcompile.PipelineError, match="on rank 0 and "):
        step(pipe, 2) if replica else pipe.eval(torch.zeros(4, 2))
    assert all(map(torch.equal, before, pipe.parameters()))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with mock.patch.object(type(pipe.ranks), "gather", None):  # equal steps compare digests alone
        assert step(pipe, 2) < first
    dist.barrier()


@pytest.mark.slow
def test_a_step_that_differs_between_replicas_changes_nothing(pool: Pool) -> None:
    """No parameter is updated, and the next step runs; so for another call on one of them."""
    pool.run(differs_once, ranks=2)
