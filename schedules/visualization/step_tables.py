"""Tables of a step: by rank and by schedule."""

from collections.abc import Sequence
from itertools import pairwise

from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.tables import Figure, Table


def rank_table(timeline: Timeline, receive_buffers: Sequence[int] = ()) -> Table:
    """Returns the work of every rank, its idle time by cause and its peak of memory, and all ranks
    together."""
    time, memory, idle = (
        timeline.costs.time_unit,
        timeline.costs.memory_unit,
        timeline.idle_by_cause,
    )
    causes = [cause for cause in idle[0] if any(of_rank[cause] for of_rank in idle)]

    rows = []
    for rank, (busy, of_rank, peak) in enumerate(
        zip(timeline.busy, idle, timeline.peak_memory, strict=True)
    ):
        row = [Figure("rank", rank), Figure("work", busy, time)]
        row += [Figure(f"idle: {cause}", of_rank[cause], time) for cause in causes]
        row += [Figure("peak memory", peak, memory)]
        rows.append(
            row + [Figure("receive buffers", count) for count in receive_buffers[rank : rank + 1]]
        )
    if len(rows) > 1:
        columns = [
            column
            for column in zip(*rows, strict=True)
            if column[0].name not in ("rank", "receive buffers")
        ]
        totals = (
            Figure(column[0].name, sum(cell.value for cell in column), column[0].unit)
            for column in columns
        )
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
