"""Tables of a step: by rank and by schedule."""

from collections.abc import Sequence
from itertools import pairwise

from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.tables import Figure, Table


def rank_table(timeline: Timeline, time: str = "", receive_buffers: Sequence[int] = ()) -> Table:
    """The work of every rank, its idle time by cause and its peak of memory, and all ranks together. `time` is the unit
    of times, unless the costs say it."""
    time, memory = timeline.costs.time_unit or time, timeline.costs.memory_unit
    idle = timeline.idle_by_cause
    causes = [cause for cause in timeline.causes if any(each[cause] for each in idle)]
    rows = [
        [
            Figure("rank", rank),
            Figure("work", timeline.busy[rank], time),
            *(Figure(f"idle: {cause}", idle[rank][cause], time) for cause in causes),
            Figure("peak memory", timeline.peak_memory[rank], memory),
            *(Figure("receive buffers", count) for count in receive_buffers[rank : rank + 1]),
        ]
        for rank in range(timeline.schedule.ranks)
    ]
    if len(rows) > 1:
        total = [Figure("rank", "all"), Figure("work", sum(timeline.busy), time)]
        total += [Figure(f"idle: {cause}", sum(each[cause] for each in idle), time) for cause in causes]
        rows.append([*total, Figure("peak memory", sum(timeline.peak_memory), memory)])
    return Table("ranks", rows=rows)


def idle_share(timeline: Timeline) -> float:
    """The part of all ranks' time, up to the end of the last one, that is no work."""
    whole = timeline.schedule.ranks * timeline.finish
    return max(0.0, float(1 - sum(timeline.busy) / whole)) if whole else 0.0


def pass_bubble(timeline: Timeline) -> float:
    """The share of the time from the first pass to the last that the busiest rank is idle."""
    return 1 - max(timeline.busy) / timeline.finish if timeline.finish else 0.0


def step_table(timelines: Sequence[Timeline]) -> Table:
    """The figures of a step under each of several schedules. `bubble` is that of the busiest rank."""
    rows = [
        [
            Figure("schedule", t.schedule.name),
            Figure("makespan", t.makespan, t.costs.time_unit),
            Figure("bubble", float(t.bubble), "share"),
            Figure("cost", t.cost, t.costs.time_unit),
            Figure("cost bubble", float(t.cost_bubble), "share"),
            Figure("idle of all ranks", idle_share(t), "share"),
            Figure("peak memory", max(t.peak_memory), t.costs.memory_unit),
            Figure("messages", 2 * t.schedule.microbatches * _boundaries(t.schedule.placement)),
        ]
        for t in timelines
    ]
    return Table("schedules", rows=rows)


def _boundaries(placement: Placement) -> int:
    """Returns the number of boundaries between stages that are on two ranks."""
    return sum(owners != following for owners, following in pairwise(placement.owners))
