"""The closed form of a schedule next to a predicted step."""

from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import mean
from typing import Any

from zbcompile.schedules import Costs, Schedule, ScheduleError, Timeline, build, closed_form
from zbcompile.schedules.simulation.closed_forms import c


@dataclass(frozen=True)
class EqualStages:
    """The bubble that `formula`, the closed form of `schedule`, gives for the same work in equal stages."""

    schedule: str
    formula: str
    bubble: float


def with_equal_stages(timeline: Timeline) -> EqualStages | None:
    """The closed form at the mean times of the stages; None if there is none, or its condition does not hold there.

    The difference to the predicted bubble is due to stages that differ.
    """
    schedule, costs = timeline.schedule, _equal(timeline.costs)
    if not _is_of_its_name(schedule):
        return None
    try:
        form = closed_form(schedule.name)
        bubble, length = form.bubble, form.makespan
        if bubble is None or length is None or not bubble.holds(schedule, costs):
            return None
        share = float(bubble.at(schedule, costs))
    except ScheduleError:  # hops or pairs that differ, where closed forms assume equal ones; or a searched order
        return None
    shown = length.value if costs.comm else length.value.subs(c, 0)
    return EqualStages(schedule.name, f"1 - {form.work}/({shown})", share)


def _equal(costs: Costs) -> Costs:
    names = ("forward", "backward", "weight")  # as fractions, because closed forms ask for ==
    even: dict[str, Any] = {name: (mean(map(Fraction, getattr(costs, name))),) * costs.stages for name in names}
    return replace(costs, activation=(), residue=(), **even)


def _is_of_its_name(schedule: Schedule) -> bool:
    """Whether the orders are those that `build` makes for this name: a file may have the name of one."""
    try:
        chunks = schedule.placement.chunks
        return build(schedule.name, schedule.ranks, schedule.microbatches, chunks=chunks) == schedule
    except ScheduleError:
        return False
