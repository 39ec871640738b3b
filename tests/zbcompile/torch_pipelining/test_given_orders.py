"""Orders that torch's own tests run, and others that no name has: given as a file or an object,
with eager's bits."""

from pathlib import Path
from typing import Any

import pytest

import zbcompile
from tests.support import training
from tests.support.oracle import PROBLEMS
from zbcompile import schedules

# One rank a line, in torch's letters, as the schedules that torch keeps for its tests: five stages on
# two ranks, weight gradients apart, messages and what waits for them, and backwards that begin with
# the last microbatch.
FILES = {
    "unbalanced": "0F0,1F0,,,4F0,4B0,,,1B0,0B0\n,,2F0,3F0,,,3B0,2B0,,\n",
    "weights": (
        "0F0,0F1,2F0,2F1,,2I0,2W0,0I0,2I1,0W0,0I1,2W1,0W1\n,1F0,1F1,3F0,3I0,3F1,1I0,3I1,3W0,1I1,1W0,3W1,1W1\n"
    ),
    "waits": (
        "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RESHARD\n"
    ),
    "last first": "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1I2,1I1,1I0,1W0,1W2,1W1\n",
}

DESCENDING = {"last first": (0, 2, 1)}  # the W of stage 1 in those that do not ascend


def step_of(schedule: Any, exact: bool = True) -> tuple[zbcompile.Pipeline, training.Trained]:
    """One step of the oracle's net; the schedule alone says how many ranks and microbatches there
    are."""
    problem = PROBLEMS["mlp"]
    pipe = zbcompile.pipeline(problem.model(), schedule=schedule, loss=problem.loss, exact=exact)
    choices = pipe.options.schedule
    assert isinstance(choices, schedules.Schedule)
    with training.compiled_once("mlp", exact):
        return pipe, training.train(
            pipe, training.Case("mlp", choices.name, choices.ranks, choices.microbatches, steps=1)
        )


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("name", FILES)
def test_an_order_of_torch_runs_as_a_file(name: str, tmp_path: Path) -> None:
    """Every order of torch's tests with eager's bits; one whose W do not ascend only where
    exact=True is not asked."""
    path = tmp_path / f"{name}.csv"
    path.write_text(FILES[name], encoding="utf-8")
    if name not in DESCENDING:
        pipe, ours = step_of(str(path))
        training.assert_bitwise(ours, training.eager("mlp", pipe.program.schedule.microbatches, 1))
        return
    pipe, ours = step_of(str(path), exact=False)
    training.assert_close(ours, training.eager("mlp", pipe.program.schedule.microbatches, 1))
    assert pipe.program.schedule.weight_order(1) == DESCENDING[name]
    says = r"weight gradients of stage \d run microbatch \d before [01]"
    with pytest.raises(schedules.ScheduleError, match=says):
        step_of(str(path))


@pytest.mark.slow
def test_any_map_of_stages_to_ranks(tmp_path: Path) -> None:
    """An order that no name has, checked, lowered, written, read back, searched, and run, also with
    its messages."""
    placement, owners = schedules.Placement.of_ranks((2, 0, 1, 1, 0, 2, 2)), (2, 0, 1, 1, 0, 2, 2)
    orders = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        passes = [("F", s) for s in stages] + [(op, s) for s in reversed(stages) for op in "BW"]
        orders.append(tuple(schedules.Action(op, s, m) for op, s in passes for m in range(3)))
    schedule, costs = (
        schedules.Schedule("mine", placement, 3, tuple(orders)),
        schedules.Costs.uniform(len(owners)),
    )
    schedules.check(schedule)
    lowered = schedules.lower(schedule)
    schedules.check(lowered)
    for ending in ("csv", "json"):
        schedules.save(schedule, tmp_path / f"mine.{ending}")
        assert schedules.load(tmp_path / f"mine.{ending}").orders == schedule.orders
    result = schedules.search(costs, schedule.ranks, 3, placements=[str(placement)], passes=8)
    assert result.simulation.makespan <= schedules.simulate(schedule, costs).makespan
    schedules.check(result.schedule)
    for given in (result.schedule, lowered):
        pipe, ours = step_of(given)
        assert [pipe.program.rank_of(stage) for stage in range(len(owners))] == list(owners)
        training.assert_bitwise(ours, training.eager("mlp", 3, 1))
    assert pipe.program.lowered == lowered
