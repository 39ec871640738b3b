"""A timeline for terminals: steps at their times, idle time as dots."""

from collections.abc import Sequence

from zbcompile.amounts import format_bytes, format_time, plain
from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.simulation.timeline import Timeline


def summary(timeline: Timeline) -> str:
    """Returns one line with the figures of a step.

    >>> from zbcompile.schedules import build, simulate
    >>> print(summary(simulate(build("1f1b", ranks=4, microbatches=8))))
    1f1b, 4 ranks, 8 microbatches: makespan 33 (bubble 27.3%), cost 33 (bubble 27.3%), peak memory 4
    """
    schedule, unit = timeline.schedule, timeline.costs.time_unit
    sizes = f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    makespan = (
        f"makespan {format_amount(timeline.makespan, unit)} (bubble {float(timeline.bubble):.1%})"
    )
    cost = f"cost {format_amount(timeline.cost, unit)} (bubble {float(timeline.cost_bubble):.1%})"
    peak = format_amount(max(timeline.peak_memory), timeline.costs.memory_unit)
    return f"{sizes}: {makespan}, {cost}, peak memory {peak}"


def format_amount(value: float, unit: str) -> str:
    """Returns a number of the costs with a readable multiple of its unit: seconds ("s"), bytes
    ("B"), FLOPs or none.

    >>> format_amount(33, ""), format_amount(0.00738265, "s"), format_amount(16384, "B")
    ('33', '7.38 ms', '16.0 KiB')
    """
    if not unit:
        return plain(value)
    return format_bytes(value) if unit == "B" else format_time(float(value), unit)


def format_timeline(timeline: Timeline, width: int | None = None) -> str:
    """Returns the summary and a line per rank, true to time.

    `width` limits the characters of a line; labels are then cut.

    >>> from zbcompile.schedules import build, simulate
    >>> print(format_timeline(simulate(build("gpipe", ranks=2, microbatches=1))))
    gpipe, 2 ranks, 1 microbatches: makespan 6 (bubble 50.0%), cost 6 (bubble 50.0%), peak memory 1
    rank 0  F0.0 ...............BW0.0
    rank 1  .....F1.0 BW1.0     ..........
    """
    labels = [f"rank {rank}" for rank in range(timeline.schedule.ranks)]
    label_width = max(map(len, labels))
    spans = [span for span in timeline.spans if span.end > span.start]
    # characters
    scale = max(((len(str(span.step)) + 1) / (span.end - span.start) for span in spans), default=1)
    if width is not None and timeline.finish:
        scale = min(scale, (width - label_width - 2) / timeline.finish)
    rows = [["."] * round(timeline.finish * scale) for _ in labels]
    for rank, step, start, end in spans:
        first, last = round(start * scale), round(end * scale)
        ops = "|".join(action.op for action in flatten((step,)))
        text = next(
            (text for text in (str(step), ops) if len(text) <= last - first), ops[: last - first]
        )
        rows[rank][first:last] = text.ljust(last - first)
    lines = (
        f"{label:<{label_width}}  {''.join(row)}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    )
    return "\n".join([summary(timeline), *lines])


def compare_text(timelines: Sequence[Timeline], width: int = 100) -> str:
    """Returns the timelines as text, all in the same number of characters per time."""
    longest = max(t.finish for t in timelines) or 1
    label = max(len(f"rank {t.schedule.ranks - 1}") for t in timelines) + 2
    rows = (
        format_timeline(t, label + max(1, int((width - label) * t.finish / longest)))
        for t in timelines
    )
    return "\n\n".join(rows)
