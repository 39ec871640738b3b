"""Tables of a step: by rank and by schedule."""

from collections.abc import Sequence
from itertools import pairwise

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.tables import Figure, Table


def rank_table(timeline: Timeline) -> Table:
    """Returns the work of every rank, its idle time by cause and its peak of memory, and all ranks
    together."""
    time, memory, idle = (
        timeline.costs.time_unit,
        timeline.costs.memory_unit,
        timeline.idle_by_cause,
    )
    causes = [cause for cause in idle[0] if any(of_rank[cause] for of_rank in idle)]

    rows = []
    for rank, busy in enumerate(timeline.busy):
        row = [Figure("rank", rank), Figure("work", busy, time)]
        row += [Figure(f"idle: {cause}", idle[rank][cause], time) for cause in causes]
        rows.append([*row, Figure("peak memory", timeline.peak_memory[rank], memory)])
    if len(rows) > 1:
        columns = [*zip(*rows, strict=True)][1:]
        totals = (Figure(c[0].name, sum(cell.value for cell in c), c[0].unit) for c in columns)
        rows.append([Figure("rank", "all"), *totals])
    return Table("ranks", rows=rows)


def idle_share(timeline: Timeline) -> float:
    """Returns the part of all ranks' time, up to the end of the last one, that is no work."""
    total = timeline.schedule.ranks * timeline.finish
    return max(0.0, float(1 - sum(timeline.busy) / total)) if total else 0.0


def step_table(timelines: Sequence[Timeline]) -> Table:
    """Returns the figures of a step under each of several schedules. `bubble` is that of the
    busiest rank."""
    rows = []
    for timeline in timelines:
        schedule, time = timeline.schedule, timeline.costs.time_unit
        boundaries = sum(
            owners != following for owners, following in pairwise(schedule.placement.owners)
        )  # between two ranks
        rows.append(
            [
                Figure("schedule", schedule.name),
                Figure("makespan", timeline.makespan, time),
                Figure("bubble", float(timeline.bubble), "share"),
                Figure("cost", timeline.cost, time),
                Figure("cost bubble", float(timeline.cost_bubble), "share"),
                Figure("idle of all ranks", idle_share(timeline), "share"),
                Figure("peak memory", max(timeline.peak_memory), timeline.costs.memory_unit),
                Figure("messages", 2 * schedule.microbatches * boundaries),
            ]
        )
    return Table("schedules", rows=rows)
