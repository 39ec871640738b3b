"""A recorded step compared with its prediction: where they differ, rank by rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zbcompile.amounts import format_share, format_signed, format_time
from zbcompile.errors import PipelineError
from zbcompile.prediction.predict import Basis
from zbcompile.program.step_record import StepRecord, mean_seconds
from zbcompile.schedules import Schedule, Timeline, format_timeline, simulate, with_updates
from zbcompile.schedules.ir.actions import ONCE
from zbcompile.schedules.visualization.step_tables import pass_bubble
from zbcompile.schedules.visualization.svg import compare_svg
from zbcompile.schedules.visualization.text import compare_text
from zbcompile.tables import WIDTH, Figure, Table, facts

LARGEST_RATIO = 4  # of two steps that are drawn on one axis
PASSES = ("F", "B", "W", "BW", "S", "T")
WAITS = ("warm-up", "wait", "cool-down")
# differ only along with entries that are reported anyway
_SILENT = (
    "threads",
    "order",
    "graphs",
    "types",
)
# The parts of a rank's difference; they add up to it. `communication`: results that were made and
# on their way while it stood waiting for them. `waiting`: waits for passes of other ranks, while
# the pipeline fills, runs and drains. `overhead`: all inputs had arrived: the host's work between
# two passes.
PARTS: Mapping[str, Sequence[str]] = {
    "compute": (),  # its own passes
    "communication": ("communication",),
    "waiting": WAITS,
    "overhead": ("overhead",),
}


@dataclass(frozen=True)
class StepComparison:
    """A record next to the prediction `predicted`, whose times are those of `basis`. Steps count
    from the first pass to the end of the last, in seconds. `notes` say what else differs between
    the program that was recorded and this.
    """

    record: StepRecord
    predicted: Timeline
    basis: str
    notes: tuple[str, ...]

    @cached_property
    def measured(self) -> Timeline:
        return self.record.as_ranks(self.predicted.costs)

    def _repr_html_(self) -> str:
        """In notebooks, the predicted step above the measured one."""
        return compare_svg([self.predicted, self.measured])

    def tables(self) -> Iterator[Table]:
        """The report of `--measured`."""
        schedule, in_process = self.predicted.schedule, self.record.in_process
        yield facts(
            "measured",
            [
                Figure("schedule", schedule.name),
                Figure("ranks", schedule.ranks),
                Figure("stages", schedule.stages),
                Figure("microbatches", schedule.microbatches),
                Figure(
                    "recorded",
                    "in one process, its passes replayed" if in_process else "by every rank",
                ),
                Figure("step", self.measured.finish, "s"),
                Figure("bubble", pass_bubble(self.measured), "share"),
                Figure("whole call", self.record.step_time, "s"),
                Figure("predicted step", self.predicted.finish, "s"),
                Figure("predicted bubble", pass_bubble(self.predicted), "share"),
                Figure("predicted", self.basis),
            ],
            notes=list(self._what_it_says()),
        )
        difference = _signed(self.measured.finish - self.predicted.finish)
        yield Table("ranks", f"Where the {difference} are: measured less predicted", self.ranks)
        title = (
            "Time of each pass, mean over the microbatches: measured, and how often the predicted"
            " time"
        )
        yield Table("passes", title, self.passes)
        title, picture = _pictures(self.predicted, self.measured)
        yield Table("steps", title, picture=picture)
        yield Table("notes", notes=[f"- {note}" for note in self.notes])

    @property
    def ranks(self) -> list[list[Figure]]:
        """The difference between the measured and the predicted time of every rank's step, in
        parts."""
        peaks = self.record.peak_activation_bytes
        return [
            [
                Figure("rank", rank),
                *(Figure(part, self._more(rank, part), "s more") for part in PARTS),
                Figure("peak predicted", int(self.predicted.peak_memory[rank]), "B"),
                Figure("peak measured", peaks[rank], "B"),
            ]
            for rank in range(self.predicted.schedule.ranks)
        ]

    def _more(self, rank: int, part: str) -> float:
        before, after = self.predicted, self.measured
        if part == "compute":
            return after.busy[rank] - before.busy[rank]
        idle: list[dict[Any, float]] = [after.idle_by_cause[rank], before.idle_by_cause[rank]]
        now, then = (sum(each.get(cause, 0.0) for cause in PARTS[part]) for each in idle)
        return float(now - then)

    @cached_property
    def _seconds(self) -> dict[tuple[str, int], tuple[float, float]]:
        """The seconds of every recorded pass of every stage: predicted, and measured as the mean
        over the microbatches."""
        costs, measured = self.predicted.costs, mean_seconds(self.record.spans)
        return {
            (op, s): (float(costs.time(op, s)), t)
            for (op, s), t in measured.items()
            if op in PASSES
        }

    @property
    def passes(self) -> list[list[Figure]]:
        """The measured seconds of each pass, and how many times the predicted ones they are."""
        names = [name for name in PASSES if any(op == name for op, _ in self._seconds)]
        rows = []
        for stage in sorted({stage for _, stage in self._seconds}):
            row = [Figure("stage", stage)]
            for name in names:
                predicted, measured = self._seconds.get((name, stage), (None, None))
                ratio = measured / predicted if measured is not None and predicted else None
                row += [
                    Figure(name, measured, "s", "microbatch"),
                    Figure(f"{name} ratio", ratio, "ratio"),
                ]
            rows.append(row)
        return rows

    def _what_it_says(self) -> Iterator[str]:
        """The conclusions from the tables, in words."""
        step, predicted = self.measured.finish, self.predicted.finish
        times = f"{step / predicted:.2f} times" if predicted else "longer than"
        yield f"The step took {times} the predicted time. {self._largest()}"
        known = {key: pair for key, pair in self._seconds.items() if all(pair)}
        if known:
            expected, whole = (sum(column) for column in zip(*known.values(), strict=True))
            ratios = {key: measured / expected for key, (expected, measured) in known.items()}
            extremes = (
                f"{ratios[key]:.2f} times ({key[0]} of stage {key[1]})"
                for key in (
                    min(ratios, key=ratios.__getitem__),
                    max(ratios, key=ratios.__getitem__),
                )
            )
            yield (
                f"The passes took {whole / expected:.2f} times their predicted time, from"
                f" {' to '.join(extremes)}."
            )
        if not self.record.in_process:
            replayed = simulate(self.record.schedule, self.record.costs_of_passes).finish
            share = format_share((step - replayed) / step if step else 0.0)
            yield (
                "If every pass took its mean measured time and messages took none, the step would"
                f" take {format_time(replayed, 's')}: {_signed(step - replayed)} ({share} of the"
                " step) is messages, the host between passes, and slower microbatches."
            )

    def _largest(self) -> str:
        count = self.predicted.schedule.ranks
        means = {
            part: sum(self._more(rank, part) for rank in range(count)) / count for part in PARTS
        }
        order = sorted(means, key=lambda part: -abs(means[part]))
        told = [
            f"{part} {_signed(means[part])}"
            for part in order
            if abs(means[part]) > 1e-6 * self.measured.finish
        ]
        return f"On average over the ranks: {', '.join(told)}." if told else "No rank differs."


def compare_step(
    record: StepRecord,
    predicted: Timeline,
    basis: Basis,
    manifest: Mapping[str, Any],
    rescale: bool = False,
) -> StepComparison:
    """Compare `record` with its prediction under `basis`; `manifest` is that of the program that
    was predicted. `rescale`: of the predicted times only the ratios count, and all passes together
    take as long as in the record.

    Raises PipelineError if the record is of another schedule, or the prediction is not in seconds.
    """
    if basis.unit != "s":
        raise PipelineError(
            "--measured compares seconds; --costs uniform has none. Use flops, or a file of costs."
        )
    updates = record.schedule.ops & ONCE  # the optimizer's actions, which the record alone has
    if updates:
        predicted = simulate(with_updates(predicted.schedule, updates), predicted.costs)
    _require_same_schedule(record.schedule, predicted.schedule)
    text = basis.text
    if rescale:
        factor = sum(record.timeline.busy) / (sum(predicted.busy) or 1.0)
        times = ("forward", "backward", "weight", "saved", "vocab_s", "vocab_t")
        scaled: dict[str, Any] = {
            n: tuple(factor * time for time in getattr(predicted.costs, n)) for n in times
        }
        predicted = simulate(predicted.schedule, replace(predicted.costs, **scaled))
        text = f"{text}; {factor:.2f} times that, so that all passes take as long as measured"
    return StepComparison(record, predicted, text, tuple(_other_program(record.program, manifest)))


def _require_same_schedule(recorded: Schedule, here: Schedule) -> None:
    """Raise PipelineError unless a record has the actions that are predicted."""
    if recorded.orders == here.compute_only().orders:
        return
    sizes = [
        f"{s.name} on {s.ranks} ranks with {s.microbatches} microbatches" for s in (recorded, here)
    ]
    what = (
        "the same name and sizes, but another order"
        if sizes[0] == sizes[1]
        else f"here it is {sizes[1]}"
    )
    raise PipelineError(
        f"the record is of {sizes[0]}; {what}. Leave out --schedule: the record holds its own."
    )


def _other_program(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """The differences between the recorded program and the predicted one, which make the comparison
    doubtful."""
    differing = [key for key in here if key in recorded and recorded[key] != here[key]]
    told = [key for key in differing if key not in _SILENT]
    for key in told:
        was, now = (str(each[key]) for each in (recorded, here))
        values = f"{was} there, {now} here" if len(was) + len(now) < 60 else "not the same"
        yield f"recorded from another program: {key} {values}"
    if not told and set(differing) & {"graphs", "types"}:
        yield "recorded from another program: its graphs differ"


def _signed(seconds: float) -> str:
    return format_signed(seconds, lambda each: format_time(each, "s"))


def _pictures(predicted: Timeline, measured: Timeline) -> tuple[str, str]:
    """Pictures of both steps, on one time axis unless one of them would be too small there."""
    longest, shortest = (each(predicted.finish, measured.finish) for each in (max, min))
    if shortest * LARGEST_RATIO < longest:
        title = "Predicted and measured, each on its own time axis (dots are idle time)"
        texts = [format_timeline(timeline, WIDTH) for timeline in (predicted, measured)]
    else:
        title = "Predicted and measured, on one time axis (dots are idle time)"
        texts = compare_text([predicted, measured], WIDTH).split("\n\n")
    names = zip(("predicted", "measured"), texts, strict=True)
    return title, "\n\n".join("\n".join([name, *text.splitlines()[1:]]) for name, text in names)
