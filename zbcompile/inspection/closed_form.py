"""The closed form of a schedule next to a predicted step."""

from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import mean
from typing import Any

from zbcompile.schedules import Costs, Schedule, ScheduleError, Timeline, build, closed_form
from zbcompile.schedules.simulation.closed_forms import c


@dataclass(frozen=True)
class EqualStages:
    """The bubble of the same work in equal stages, by `formula`, the closed form of `schedule`."""

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
    except ScheduleError:  # closed forms assume equal hops and pairs, and have no searched orders
        return None
    shown = length.value if costs.comm else length.value.subs(c, 0)
    return EqualStages(schedule.name, f"1 - {form.work}/({shown})", share)


def _equal(costs: Costs) -> Costs:
    names = ("forward", "backward", "weight")  # as fractions: the conditions of closed forms compare with ==
    even: dict[str, Any] = {name: (mean(map(Fraction, getattr(costs, name))),) * costs.stages for name in names}
    return replace(costs, activation=(), residue=(), **even)


def _is_of_its_name(schedule: Schedule) -> bool:
    """Whether `build` makes these orders for this name: the schedule of a file may only share it. Which values go
    straight to later stages changes no order."""
    try:
        chunks = schedule.placement.chunks
        own = build(schedule.name, schedule.ranks, schedule.microbatches, chunks=chunks)
        return replace(own, ways=schedule.ways) == schedule
    except ScheduleError:
        return False
