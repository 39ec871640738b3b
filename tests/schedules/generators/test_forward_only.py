"""Forward passes alone: right, complete, and in the order that messages need."""

import pytest

from zbcompile.schedules import Action, Placement, Schedule, ScheduleError, check, lower, simulate
from zbcompile.schedules.generators.forward_only import forward_only

PLACEMENTS = (
    Placement.named("linear", 4),
    Placement.named("looped", 2, 3),
    Placement.named("v", 4, 2),
    Placement.named("dual", 4),
    Placement.of_ranks((0, 0, 1, 1, 2, 3)),
)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_every_forward_once(placement: Placement, microbatches: int) -> None:
    schedule = forward_only(placement, microbatches)
    check(schedule)
    check(lower(schedule))
    actions = [action for order in schedule.orders for action in order]
    assert sorted(actions) == [
        Action("F", s, i) for s in range(placement.stages) for i in range(microbatches)
    ]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
def test_shards_of_an_output_layer_scan_once_and_exchange_statistics(placement: Placement) -> None:
    schedule = forward_only(placement, 6, shards=True, lookups=True)
    check(schedule)
    lowered = lower(schedule)
    check(lowered)
    posted = {step[0] for program in lowered.orders for step in program}
    assert {"EMBED", "BROADCAST", "STATS"} <= posted
    assert not {"INPUT_GRAD", "EMBED_GRAD", "T", "B", "W"} & posted
    scans = [action for order in schedule.orders for action in order if action[0] == "S"]
    assert len(scans) == 6 * placement.ranks


def test_a_straight_line_fills_and_drains() -> None:
    assert simulate(forward_only(Placement.named("linear", 4), 8)).makespan == 8 + 4 - 1


def test_a_forward_that_is_missing_is_named() -> None:
    complete = forward_only(Placement.named("linear", 2), 2)
    damaged = Schedule(
        complete.name, complete.placement, 2, (complete.orders[0], complete.orders[1][:1])
    )
    with pytest.raises(ScheduleError, match="rank 1 never runs F of stage 1, microbatch 1"):
        check(damaged)
