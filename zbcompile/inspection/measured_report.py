"""Compares a recorded step with its prediction, rank by rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zbcompile.amounts import format_time
from zbcompile.errors import PipelineError
from zbcompile.prediction.predict import CostSource
from zbcompile.program.step_record import StepRecord, mean_seconds
from zbcompile.program.updates import with_updates
from zbcompile.schedules import Schedule, Timeline, simulate
from zbcompile.schedules.ir.actions import ONCE
from zbcompile.schedules.visualization.text import compare_text
from zbcompile.tables import WIDTH, Figure, Table

PASSES = ("F", "B", "W", "BW", "S", "T")
# Causes of idle time by column: messages under way; passes of other ranks, while the pipeline
# fills, runs and drains; the host between two passes, when all inputs had arrived.
COLUMNS = {
    "communication": ("communication",),
    "waiting": ("warm-up", "wait", "cool-down"),
    "overhead": ("overhead",),
}
# differ only together with entries that are reported anyway
_SILENT = ("threads", "order", "graphs", "types")


@dataclass(frozen=True)
class StepComparison:
    """A recorded step and its prediction, in seconds from the first pass to the end of the last.

    Attributes:
        source: Where the predicted costs are from.
        notes: Differences between the recorded and the predicted program.
    """

    record: StepRecord
    predicted: Timeline
    source: str
    notes: tuple[str, ...]

    @cached_property
    def measured(self) -> Timeline:
        """The passes as they ran; those of one process are replayed on ranks of their own."""
        return self.record.as_ranks(self.predicted.costs)

    def tables(self) -> Iterator[Table]:
        """Yields the report of `--measured`."""
        yield Table("measured", "Ranks: measured and predicted time of one step", self.ranks)
        yield Table("passes", "Passes: measured seconds, and how often the predicted", self.passes)
        steps = compare_text([self.predicted, self.measured], WIDTH).split("\n\n")
        rows = ("\n".join(step.splitlines()[1:]) for step in steps)
        title = "Predicted above measured, on one time axis (dots are idle time)"
        yield Table("step", title, picture="\n\n".join(rows))
        yield Table("notes", notes=[self._conclusion(), *(f"- {note}" for note in self.notes)])

    @property
    def ranks(self) -> list[list[Figure]]:
        """The time of every rank by cause, measured and predicted, and its peaks of activations."""
        peaks, rows = self.record.peak_activation_bytes, []
        for rank in range(self.predicted.schedule.ranks):
            for name, step in (("measured", self.measured), ("predicted", self.predicted)):
                idle: Mapping[Any, float] = step.idle_by_cause[rank]
                causes = {
                    column: sum(idle.get(cause, 0.0) for cause in names)
                    for column, names in COLUMNS.items()
                }
                peak = peaks[rank] if step is self.measured else step.peak_memory[rank]
                rows.append(
                    [
                        Figure("rank", rank),
                        Figure("step", name),
                        Figure("compute", step.busy[rank], "s"),
                        *(Figure(column, seconds, "s") for column, seconds in causes.items()),
                        Figure("peak activations", int(peak), "B"),
                    ]
                )
        return rows

    @property
    def passes(self) -> list[list[Figure]]:
        """The mean seconds of each pass of each stage, with their ratio to the predicted ones."""
        rows: dict[int, list[Figure]] = {}
        for (op, stage), seconds in sorted(mean_seconds(self.record.spans).items()):
            if op in PASSES:
                predicted = float(self.predicted.costs.time(op, stage))
                row = rows.setdefault(stage, [Figure("stage", stage)])
                row.append(Figure(op, seconds, "s", "microbatch"))
                ratio = seconds / predicted if predicted else None
                row.append(Figure(f"{op} ratio", ratio, "ratio"))
        return [rows[stage] for stage in sorted(rows)]

    def _conclusion(self) -> str:
        step, predicted = self.measured.finish, self.predicted.finish
        times = f"{step / predicted:.2f} times the predicted" if predicted else "not the predicted"
        compute = sum(self.measured.busy) / (sum(self.predicted.busy) or 1.0)
        how = "replayed from one process" if self.record.in_process else "recorded by every rank"
        return (
            f"The step of {self.predicted.schedule.name}, {how}, took {format_time(step, 's')},"
            f" {times} {format_time(predicted, 's')} ({self.source}); its passes took"
            f" {compute:.2f} times theirs."
        )


def compare_step(
    record: StepRecord, predicted: Timeline, source: CostSource, manifest: Mapping[str, Any]
) -> StepComparison:
    """Compares a record with its prediction.

    Args:
        manifest: That of the predicted program.

    Raises:
        PipelineError: The record is of another schedule.
    """
    updates = record.schedule.ops & ONCE  # actions of the optimizer, which the record alone has
    if updates:
        predicted = simulate(with_updates(predicted.schedule, updates), predicted.costs)
    _require_same_schedule(record.schedule, predicted.schedule)
    notes = tuple(_differences(record.program, manifest))
    return StepComparison(record, predicted, source.text, notes)


def _require_same_schedule(recorded: Schedule, here: Schedule) -> None:
    if recorded.orders == here.compute_only().orders:
        return
    sizes = [
        f"{s.name} on {s.ranks} ranks with {s.microbatches} microbatches" for s in (recorded, here)
    ]
    what = f"here it is {sizes[1]}"
    if sizes[0] == sizes[1]:
        what = "the same name and sizes, but another order"
    raise PipelineError(
        f"the record is of {sizes[0]}; {what}. Leave out --schedule: the record holds its own."
    )


def _differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences between two programs, which make the comparison doubtful."""
    differing = [key for key in here if key in recorded and recorded[key] != here[key]]
    reported = [key for key in differing if key not in _SILENT]
    for key in reported:
        was, now = str(recorded[key]), str(here[key])
        values = f"{was} there, {now} here" if len(was) + len(now) < 60 else "not the same"
        yield f"recorded from another program: {key} {values}"
    if not reported and set(differing) & {"graphs", "types"}:
        yield "recorded from another program: its graphs differ"
