"""The record of a step, and its file: JSON with every span of every rank. docs/training.md lists its fields."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.profiling.recorded_timeline import Span, recorded_costs, recorded_timeline
from zbcompile.schedules import Costs, Lowered, Schedule, ScheduleError, Timeline, from_json, simulate, to_json
from zbcompile.schedules.visualization.figure import figure
from zbcompile.schedules.visualization.units import in_units

FORMAT, VERSION = "zbcompile step", 1


@dataclass(frozen=True)
class StepRecord:
    """The value of `pipe.last_step` after a recorded step, the same on every rank.

    `spans[rank]` are the actions in the order in which they ran, in seconds since `started`, which is on the clock of
    the first rank, as are all times. `held_bytes[rank]` is what waited for B and W after each of them, counted by
    storage, `peak_activation_bytes[rank]` its largest value; `bytes_sent[rank]` what the rank's sends carried.
    `step_time` is the seconds from the first rank's begin to the last one's end. `schedule` is what was run, `program`
    the manifest of the program that it was compiled to.
    """

    spans: dict[int, list[Span]]
    held_bytes: dict[int, list[int]]
    bytes_sent: dict[int, int]
    step_time: float
    started: float
    in_process: bool
    schedule: Schedule = field(repr=False)
    program: Mapping[str, Any] = field(repr=False)

    @property
    def peak_activation_bytes(self) -> dict[int, int]:
        return {rank: max(held) for rank, held in self.held_bytes.items()}

    @cached_property
    def costs(self) -> Costs:
        """The mean seconds of every pass, and the delay of a message (`zbcompile.profiling.recorded_timeline`)."""
        return recorded_costs(self.schedule, self.spans)

    @property
    def costs_of_passes(self) -> Costs:
        """The same with messages that take no time."""
        return replace(self.costs, comm=0)

    @cached_property
    def timeline(self) -> Timeline:
        """The passes as they ran, in the simulator's terms: pictures, idle intervals, the critical path."""
        return recorded_timeline(self.schedule, self.spans, self.costs)

    @cached_property
    def idle(self) -> dict[int, dict[str, float]]:
        """The seconds without a pass of each rank by cause, from the first start to the last end of all ranks.

        `zbcompile.schedules.simulation.idle_causes` defines the causes. Empty in one process, where ranks take turns.
        """
        causes = () if self.in_process else self.timeline.idle_by_cause
        return {rank: {str(cause): time for cause, time in idle.items()} for rank, idle in enumerate(causes)}

    def _repr_html_(self) -> str:
        """In notebooks, the passes as they ran; of ranks in one process, as if each had its own."""
        timeline = simulate(self.schedule, self.costs) if self.in_process else self.timeline
        return figure(in_units([timeline], bytes_known=False))

    def save(self, path: str | Path) -> None:
        """Write the record to a file that `python -m zbcompile.inspect TARGET --measured FILE` reads; it is the same on
        every rank, so the first one is enough.

        >>> pipe.last_step.save("step.json")                      # doctest: +SKIP
        """
        Path(path).write_text(record_to_text(self), encoding="utf-8")


def record_to_text(record: StepRecord) -> str:
    """The record as JSON; times in seconds, with the nine digits that a clock has."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "program": dict(record.program),
        "schedule": json.loads(to_json(record.schedule)),
        "step_time": round(record.step_time, 9),
        "started": record.started,
        "in_process": record.in_process,
        "bytes_sent": list(record.bytes_sent.values()),
        "held_bytes": list(record.held_bytes.values()),
        "spans": [[[s.action, round(s.start, 9), round(s.end, 9)] for s in spans] for spans in record.spans.values()],
    }
    return to_text(data, 2)


def is_record(text: str) -> bool:
    """Whether a file's text is meant to be a record."""
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_record(path: str | Path) -> StepRecord:
    """Read what `StepRecord.save` wrote. Raises PipelineError for anything else, OSError if there is no file."""
    text = Path(path).read_text(encoding="utf-8")
    if not is_record(text):
        raise PipelineError(f"{path} is not a step record; write one with pipe.record = True; pipe.last_step.save.")
    data = json.loads(text)
    if data.get("version") != VERSION:
        raise PipelineError(f"{path} has format version {data.get('version')}; this release reads version {VERSION}.")
    try:
        record = _record(data)
        _ = record.timeline  # every pass of the schedule is there
    except (LookupError, TypeError, ValueError, PipelineError, ScheduleError) as error:
        raise PipelineError(f"{path} is damaged or incomplete ({error}). Record the step again.") from None
    return record


def _record(data: dict[str, Any]) -> StepRecord:
    program = from_json(json.dumps(data["schedule"])).program
    return StepRecord(
        spans={rank: [Span(*span) for span in spans] for rank, spans in enumerate(data["spans"])},
        held_bytes=dict(enumerate(data["held_bytes"])),
        bytes_sent=dict(enumerate(data["bytes_sent"])),
        step_time=data["step_time"],
        started=data["started"],
        in_process=data["in_process"],
        schedule=program.schedule if isinstance(program, Lowered) else program,
        program=data["program"],
    )
