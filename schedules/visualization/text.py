"""A timeline for terminals: steps at their times, idle time as dots."""

from collections.abc import Sequence

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import Pair, Step
from zbcompile.schedules.simulation.timeline import Timeline


def summary(timeline: Timeline) -> str:
    """One line with the figures of a step.

    >>> from zbcompile.schedules import build, simulate
    >>> summary(simulate(build("1f1b", ranks=4, microbatches=8)))
    '1f1b, 4 ranks, 8 microbatches: makespan 33 (bubble 27.3%), cost 33 (bubble 27.3%), peak memory 4'
    """
    t, schedule, unit = timeline, timeline.schedule, timeline.costs.time_unit
    sizes = f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    makespan = f"makespan {format_amount(t.makespan, unit)} (bubble {float(t.bubble):.1%})"
    cost = f"cost {format_amount(t.cost, unit)} (bubble {float(t.cost_bubble):.1%})"
    peak = format_amount(max(t.peak_memory), timeline.costs.memory_unit)
    return f"{sizes}: {makespan}, {cost}, peak memory {peak}"


def format_amount(value: float, unit: str) -> str:
    """A number of the costs, with four digits if it has a unit.

    >>> format_amount(33, ""), format_amount(7.38265, "ms")
    ('33', '7.383 ms')
    """
    return f"{plain(value, 4)} {unit}" if unit else plain(value)


def format_timeline(timeline: Timeline, width: int | None = None) -> str:
    """The summary and a line per rank, true to time; `width` limits the characters of a line (labels are then cut).

    >>> from zbcompile.schedules import build, simulate
    >>> print(format_timeline(simulate(build("gpipe", ranks=2, microbatches=1))))
    gpipe, 2 ranks, 1 microbatches: makespan 6 (bubble 50.0%), cost 6 (bubble 50.0%), peak memory 1
    rank 0  F0.0 ...............BW0.0
    rank 1  .....F1.0 BW1.0     ..........
    """
    labels = [f"rank {rank}" for rank in range(timeline.schedule.ranks)]
    room = None if width is None else width - max(map(len, labels)) - 2
    scale = _characters_per_time(timeline, room)
    rows = [f"{label:<{max(map(len, labels))}}  {_row(timeline, r, scale)}" for r, label in enumerate(labels)]
    return "\n".join([summary(timeline), *(row.rstrip() for row in rows)])


def _characters_per_time(timeline: Timeline, room: int | None) -> float:
    """The number at which the label of every step fits, or fewer if the whole line has no `room` for it."""
    needs = [(len(str(span.step)) + 1) / (span.end - span.start) for span in timeline.spans if span.end > span.start]
    wanted = max(needs, default=1)
    return wanted if room is None or not timeline.finish else min(wanted, room / timeline.finish)


def _row(timeline: Timeline, rank: int, scale: float) -> str:
    row = ["."] * round(timeline.finish * scale)
    for span in timeline.spans_of(rank):
        start, end = round(span.start * scale), round(span.end * scale)
        if end > start:
            row[start:end] = _label(span.step, end - start)
    return "".join(row)


def _label(step: Step, room: int) -> str:
    """The label of a step, shortened to fit: whole, its letters, or one letter."""
    short = f"{step.first.op}|{step.second.op}" if isinstance(step, Pair) else step.op
    text = next((text for text in (str(step), short) if len(text) <= room), short[:room])
    return text.ljust(room)


def compare_text(timelines: Sequence[Timeline], width: int = 100) -> str:
    """The timelines as text, all in the same number of characters per time."""
    longest = max(t.finish for t in timelines) or 1
    label = max(len(f"rank {t.schedule.ranks - 1}") for t in timelines) + 2
    rows = (format_timeline(t, label + max(1, int((width - label) * t.finish / longest))) for t in timelines)
    return "\n\n".join(rows)
