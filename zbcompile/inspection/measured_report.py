"""A recorded step beside its prediction: where the difference is, and what to try."""

from collections.abc import Iterator

from zbcompile.amounts import format_share, format_signed, format_time
from zbcompile.inspection.report import advice
from zbcompile.prediction.advice import Peak, alternatives, format_idle, idle_by_cause, waiting_peak, what_limits
from zbcompile.prediction.step_comparison import PASSES, PassDifference, StepComparison
from zbcompile.schedules import Timeline, format_timeline, simulate
from zbcompile.schedules.visualization.text import compare_text
from zbcompile.tables import WIDTH, Figure, Table, facts

LARGEST_RATIO = 4  # of two steps that are drawn on one axis
PARTS = ("compute", "communication", "imbalance", "overhead")


def measured_tables(c: StepComparison, peak: Peak = waiting_peak) -> Iterator[Table]:
    """The report of `--measured`; `peak` says what the fullest rank holds."""
    predicted, measured = c.timelines
    schedule = predicted.schedule
    yield facts(
        "measured",
        [
            Figure("schedule", schedule.name),
            Figure("ranks", schedule.ranks),
            Figure("stages", schedule.stages),
            Figure("microbatches", schedule.microbatches),
            Figure("recorded", "in one process, its passes replayed" if c.in_process else "by every rank"),
            Figure("step", c.measured_step, "s"),
            Figure("bubble", c.measured_bubble, "share"),
            Figure("whole call", c.call, "s"),
            Figure("predicted step", c.predicted_step, "s"),
            Figure("predicted bubble", c.predicted_bubble, "share"),
            Figure("predicted", c.basis),
        ],
        notes=list(_what_it_says(c)),
    )
    rows = [
        [
            Figure("rank", rank.rank),
            *(Figure(part, getattr(rank, part), "s more") for part in PARTS),
            Figure("peak predicted", rank.predicted_peak, "B"),
            Figure("peak measured", rank.measured_peak, "B"),
        ]
        for rank in c.ranks
    ]
    yield Table("ranks", f"Where the {_signed(c.difference)} are: measured less predicted", rows)
    yield _passes(c)
    title, picture = _pictures(predicted, measured)
    yield Table("steps", title, picture=picture)
    yield Table("notes", notes=[f"- {note}" for note in c.notes])
    yield _what_to_try(c, peak)


def _what_to_try(c: StepComparison, peak: Peak) -> Table:
    """The alternatives to the step that the measured passes make, as `inspect --costs` with the record has them."""
    replayed = simulate(c.timelines[1].schedule, c.timelines[1].costs)
    return advice(alternatives(replayed, peak), f"{what_limits(replayed)} {format_idle(idle_by_cause(replayed))}")


def _signed(seconds: float) -> str:
    return format_signed(seconds, lambda each: format_time(each, "s"))


def _what_it_says(c: StepComparison) -> Iterator[str]:
    """The tables in words."""
    times = f"{c.measured_step / c.predicted_step:.2f} times" if c.predicted_step else "longer than"
    yield f"The step took {times} the predicted time. {_largest(c)}"
    known = [p for p in c.passes if p.predicted and p.measured]
    if known:
        whole = sum(p.measured for p in known) / sum(p.predicted for p in known)
        slow, fast = (choose(known, key=lambda p: p.measured / p.predicted) for choose in (max, min))
        extremes = (f"{p.measured / p.predicted:.2f} times ({p.name} of stage {p.stage})" for p in (fast, slow))
        yield f"The passes took {whole:.2f} times their predicted time, from {' to '.join(extremes)}."
    if not c.in_process:
        lost = c.measured_step - c.replayed_step
        share = format_share(lost / c.measured_step if c.measured_step else 0.0)
        yield (
            "If every pass took its mean measured time and messages took none, the step would take "
            f"{format_time(c.replayed_step, 's')}: {_signed(lost)} ({share} of the step) is messages, the host between "
            "passes, and slower microbatches."
        )


def _largest(c: StepComparison) -> str:
    means = {part: sum(getattr(rank, part) for rank in c.ranks) / len(c.ranks) for part in PARTS}
    order = sorted(means, key=lambda part: -abs(means[part]))
    told = [f"{part} {_signed(means[part])}" for part in order if abs(means[part]) > 1e-6 * c.measured_step]
    return f"On average over the ranks: {', '.join(told)}." if told else "No rank differs."


def _passes(c: StepComparison) -> Table:
    names = [name for name in PASSES if any(p.name == name for p in c.passes)]
    found = {(p.stage, p.name): p for p in c.passes}
    stages = sorted({p.stage for p in c.passes})
    rows = [
        [Figure("stage", stage), *(each for name in names for each in _measured(name, found.get((stage, name))))]
        for stage in stages
    ]
    title = "Time of each pass, mean over the microbatches: measured, and how often the predicted time"
    return Table("passes", title, rows)


def _measured(name: str, p: PassDifference | None) -> tuple[Figure, Figure]:
    ratio = p.measured / p.predicted if p and p.predicted else None
    return Figure(name, p and p.measured, "s", "microbatch"), Figure(f"{name} ratio", ratio, "ratio")


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
