"""A recorded step beside its prediction, as tables for a terminal and as data."""

from dataclasses import asdict, replace
from typing import Any

from zbcompile.amounts import format_share, format_time
from zbcompile.inspection.report import WIDTH, table, titled, wrap
from zbcompile.inspection.summary import SCHEMA
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.prediction.step_comparison import PASSES, PassDifference, StepComparison
from zbcompile.schedules import Timeline, format_timeline
from zbcompile.schedules.visualization.text import compare_text

LARGEST_RATIO = 4  # of two steps that are drawn on one axis
PARTS = ("compute", "communication", "imbalance", "overhead")


def comparison_to_dict(c: StepComparison) -> dict[str, Any]:
    """What `--measured FILE --json` writes; docs/inspect.md describes every field."""
    found = asdict(replace(c, timelines=()))
    del found["timelines"]
    return {"schema": SCHEMA, "measured": found}


def format_step_comparison(c: StepComparison, predicted: Timeline, measured: Timeline) -> str:
    """The report of `--measured`."""
    parts = [
        _heading(c, predicted),
        titled(f"Where the {_signed(c.difference)} are, rank by rank: measured less predicted", _ranks(c)),
        _what_it_says(c),
        titled("Time of each pass, mean over the microbatches: measured, and how often the predicted time", _passes(c)),
        titled(*_pictures(predicted, measured)),
        "\n".join(line for note in c.notes for line in wrap(f"- {note}")),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(c: StepComparison, predicted: Timeline) -> str:
    s = predicted.schedule
    how = "in one process, whose ranks took turns: its passes, replayed" if c.in_process else "by every rank"
    lines = [
        f"{s.name} on {s.ranks} ranks, {s.stages} stages, {s.microbatches} microbatches; a step recorded {how}",
        f"measured   step {format_time(c.measured_step, 's')}, bubble {format_share(c.measured_bubble)}; "
        f"the whole call {format_time(c.call, 's')}",
        f"predicted  step {format_time(c.predicted_step, 's')}, bubble {format_share(c.predicted_bubble)}; {c.basis}",
    ]
    return "\n".join(part for line in lines for part in wrap(line))


def _ranks(c: StepComparison) -> str:
    headers = ["rank", *PARTS, "peak predicted", "measured"]
    rows = [
        [
            str(rank.rank),
            *(_signed(getattr(rank, part)) for part in PARTS),
            format_bytes(rank.predicted_peak),
            format_bytes(rank.measured_peak),
        ]
        for rank in c.ranks
    ]
    return table(rows, headers)


def _signed(seconds: float) -> str:
    if not seconds:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{format_time(abs(seconds), 's')}"


def _what_it_says(c: StepComparison) -> str:
    """The tables in words."""
    times = f"{c.measured_step / c.predicted_step:.2f} times" if c.predicted_step else "longer than"
    lines = wrap(f"The step took {times} the predicted time. {_largest(c)}")
    if c.passes:
        lines += wrap(_speeds(c))
    if not c.in_process:
        lost = c.measured_step - c.replayed_step
        share = format_share(lost / c.measured_step if c.measured_step else 0.0)
        lines += wrap(
            "If every pass took its mean measured time and messages took none, the step would take "
            f"{format_time(c.replayed_step, 's')}: {_signed(lost)} ({share} of the step) is messages, the host between "
            "passes, and slower microbatches."
        )
    return "\n".join(lines)


def _largest(c: StepComparison) -> str:
    means = {part: sum(getattr(rank, part) for rank in c.ranks) / len(c.ranks) for part in PARTS}
    order = sorted(means, key=lambda part: -abs(means[part]))
    told = [f"{part} {_signed(means[part])}" for part in order if means[part]]
    return f"On average over the ranks: {', '.join(told)}." if told else "No rank differs."


def _speeds(c: StepComparison) -> str:
    """The factor by which the costs are wrong overall, and the pass for which they are wrong most."""
    known = [p for p in c.passes if p.predicted and p.measured]
    if not known:
        return ""
    whole = sum(p.measured for p in known) / sum(p.predicted for p in known)
    slow = max(known, key=lambda p: p.measured / p.predicted)
    fast = min(known, key=lambda p: p.measured / p.predicted)
    return (
        f"The passes took {whole:.2f} times their predicted time, from {fast.measured / fast.predicted:.2f} times "
        f"({fast.name} of stage {fast.stage}) to {slow.measured / slow.predicted:.2f} times ({slow.name} of stage "
        f"{slow.stage}). Equal factors leave the order as good as predicted; --costs with the record predicts from "
        "what was measured."
    )


def _passes(c: StepComparison) -> str:
    names = [name for name in PASSES if any(p.name == name for p in c.passes)]
    found = {(p.stage, p.name): p for p in c.passes}
    headers = ["stage", *(text for name in names for text in (name, f"{name} ratio"))]
    rows = []
    for stage in sorted({p.stage for p in c.passes}):
        cells = [found.get((stage, name)) for name in names]
        rows.append([str(stage), *(text for p in cells for text in _measured_and_ratio(p))])
    return table(rows, headers)


def _measured_and_ratio(p: PassDifference | None) -> tuple[str, str]:
    if p is None:
        return "", ""
    return format_time(p.measured, "s"), f"{p.measured / p.predicted:.2f}" if p.predicted else "-"


def _pictures(predicted: Timeline, measured: Timeline) -> tuple[str, str]:
    """Both steps, on one time axis unless one of them would be too small on it."""
    longest, shortest = (each(predicted.finish, measured.finish) for each in (max, min))
    if shortest * LARGEST_RATIO < longest:
        title = "Predicted and measured, each on its own time axis (dots are idle time)"
        texts = [format_timeline(timeline, WIDTH) for timeline in (predicted, measured)]
    else:
        title = "Predicted and measured, on one time axis (dots are idle time)"
        texts = compare_text([predicted, measured], WIDTH).split("\n\n")
    names = zip(("predicted", "measured"), texts, strict=True)
    return title, "\n\n".join("\n".join([name, *text.splitlines()[1:]]) for name, text in names)
