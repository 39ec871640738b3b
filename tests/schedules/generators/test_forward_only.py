"""Forward passes alone: right, complete, and in the order that messages need."""

import pytest

from zbcompile.schedules import Action, Placement, check, lower, simulate
from zbcompile.schedules.generators.forward_only import forward_only

PLACEMENTS = (
    *(Placement.named("linear", 4), Placement.named("looped", 2, 3), Placement.named("v", 4, 2)),
    *(Placement.named("dual", 4), Placement.of_ranks((0, 0, 1, 1, 2, 3))),
)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
def test_every_forward_once(placement: Placement, shards: bool) -> None:
    """Shards of an output layer scan once, and exchange statistics but no gradients."""
    schedule = forward_only(placement, 6, shards=shards, lookups=shards)
    lowered = lower(schedule)
    check(schedule)
    check(lowered)
    actions = sorted(action for order in schedule.orders for action in order)
    forwards = [Action("F", s, i) for s in range(placement.stages) for i in range(6)]
    assert [action for action in actions if action.op == "F"] == forwards
    posted = {step[0] for program in lowered.orders for step in program}
    assert ({"EMBED", "BROADCAST", "STATS"} <= posted) == shards
    assert not {"INPUT_GRAD", "EMBED_GRAD", "T", "B", "W"} & posted
    assert sum(action.op == "S" for action in actions) == 6 * placement.ranks * shards


def test_a_straight_line_fills_and_drains() -> None:
    assert simulate(forward_only(Placement.named("linear", 4), 8)).makespan == 8 + 4 - 1
