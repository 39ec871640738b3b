"""Two replicas of a pipeline train as one process does on the concatenated batch."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.replicated import (
    Gradients as Found,
    in_one_process,
    mesh_of_replicas,
    replicated,
    replicated_in_half_precision,
    summed_in_single_precision,
)
from tests.support.training import Case, pipeline_of
from zbcompile.distributed.mesh import Replicas
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.replicas import Reduction, Sum, plan_sums
from zbcompile.program.updates import with_updates
from zbcompile.schedules.ir.actions import REDUCE, flatten

# Sums of the same numbers in another order: replicas add up their own microbatches first. Each
# addition rounds by at most 2^-24 of the sum so far; 24 of them stay below this, relative to the
# largest entry.
BOUND = 24 * 2.0**-24


def assert_near(ours: Found, theirs: Found) -> None:
    for name, gradient in ours.items():
        second = theirs[name]
        assert gradient is not None
        assert second is not None
        assert (gradient - second).abs().max() <= BOUND * second.abs().max(), name


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "schedule", "reduction", "unsynchronised"),
    [
        ("small-tied", "zb-h1", "mean", 0),
        ("small-dropout", "zb-h1", "mean", 1),
        ("mlp", "zb-h1", "sum", 2),
        ("small-tied", "dualpipe", "mean", 1),
    ],
)
def test_gradients_are_those_of_the_concatenated_batch(
    problem: str, schedule: str, reduction: str, unsynchronised: int, pool: Pool
) -> None:
    runs = pool.run(replicated, problem, schedule, reduction, unsynchronised, ranks=4)
    expected = in_one_process(problem, reduction, unsynchronised + 2)
    names: set[str] = set()
    for rank, run in enumerate(runs):
        assert torch.allclose(
            torch.stack(run.losses), torch.stack(expected.losses), rtol=BOUND, atol=0
        )
        assert_near(run.gradients, expected.gradients)
        assert torch.allclose(run.norm, expected.norm, rtol=BOUND)
        assert_near(run.clipped, expected.clipped)
        twin = runs[(rank + 2) % 4]
        assert all(torch.equal(run.gradients[name], twin.gradients[name]) for name in run.gradients)
        names |= run.gradients.keys()
    assert names == expected.gradients.keys()


@pytest.mark.slow
def test_half_precision_is_rounded_after_the_sum_over_replicas(pool: Pool) -> None:
    """Sums are float32 until the end, so they differ from one float32 sum by the order of additions
    alone: about 1e-7, which turns the rounding to bfloat16 (8 bits) for one entry in some thousand,
    by one step."""
    expected = summed_in_single_precision()
    for results in pool.run(replicated_in_half_precision, ranks=2):
        for name, gradient in results.items():
            assert gradient is not None
            assert gradient.dtype == torch.bfloat16
            assert torch.allclose(gradient, expected[name], rtol=2.0**-7, atol=0), name
            assert (gradient != expected[name]).float().mean() <= 0.01, name


def buffers_of_a_replica() -> tuple[int, dict[str, Tensor]]:
    """Returns the number of this replica, and its buffers after a step on its half of a batch."""
    mesh = mesh_of_replicas()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
    )
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss, mesh=mesh
    )
    replica = mesh["dp"].get_local_rank()
    rows = torch.randn(2, 8, 4)[replica]
    pipe.step(rows, target=rows)
    return replica, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.slow
def test_replicas_have_the_buffers_of_the_first(pool: Pool) -> None:
    """As with DistributedDataParallel: the running mean of each follows its own rows, and the
    first replica's is sent to the others."""
    results = pool.run(buffers_of_a_replica, ranks=2)
    first, second = (buffers for _, buffers in sorted(results, key=lambda result: result[0]))
    assert len(first) == 6
    assert all(torch.equal(second[name], buffer) for name, buffer in first.items())


def clipped(case: Case) -> tuple[Tensor, Tensor]:
    """The norm by the pipeline, and by torch over the gradients of all parameters."""
    pipe = pipeline_of(case)
    batch = PROBLEMS[case.problem].batches(1, 2 * case.microbatches)[0]
    pipe.step(*batch.args, target=batch.target)
    norm = pipe.clip_grad_norm_(0.1)
    return norm, nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None])


@pytest.mark.slow
def test_clipping_counts_tied_parameters_once(pool: Pool) -> None:
    """Bit for bit torch's norm of the whole model's gradients, in one process and in two."""
    case = Case("small-tied", "1f1b", 2, 4)
    norm, after = pool.alone(clipped, case)
    model = PROBLEMS[case.problem].model()
    batch = PROBLEMS[case.problem].batches(1, 2 * case.microbatches)[0]
    for part in batch.parts(case.microbatches):
        (PROBLEMS[case.problem].loss(model(*part.args), part.target) / case.microbatches).backward()  # type: ignore[misc]
    assert torch.equal(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert after == pytest.approx(0.1, rel=1e-5)
    for second, _ in pool.run(clipped, case):
        assert torch.equal(second, norm)


def test_a_reduction_begins_after_the_last_weight_gradient_of_its_stage() -> None:
    """Not at the end of the step: on each rank of ZB-V the first of the two stages is reduced while
    passes remain."""
    pipe = pipeline_of(Case("mlp", "zb-v", 2, 4))
    batch = PROBLEMS["mlp"].batches(1, 8)[0]
    program = pipe.compile(*batch.args, target=batch.target).program
    for rank in range(2):
        gradients = Gradients({}, program.shared, program.choices)
        sums = {name: Sum(dist.group.WORLD, True) for name in program.trained}  # type: ignore[arg-type]
        reduction = Reduction(Replicas(count=2), plan_sums(program, rank, sums), gradients)
        assert reduction.reduces
        order = flatten(with_updates(program.schedule, [REDUCE]).orders[rank])
        reduced = [action for action in order if action.op == REDUCE]
        assert sorted(a.stage for a in reduced) == sorted(program.stages_of(rank))
        for action in reduced:
            assert not any(a.stage == action.stage for a in order[order.index(action) + 1 :])
        assert min(order.index(action) for action in reduced) < len(order) - 2
