"""A recorded step as a file: JSON with every span of every rank. docs/training.md lists its fields."""

import json
from pathlib import Path
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.profiling.recorded_timeline import Span
from zbcompile.runtime.recorder import StepRecord
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.files import from_json, to_json
from zbcompile.schedules.ir.schedule import Lowered

FORMAT, VERSION = "zbcompile step", 1


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
    """Read what `StepRecord.save` wrote. Raises PipelineError for anything else, OSError where there is no file."""
    text = Path(path).read_text(encoding="utf-8")
    if not is_record(text):
        raise PipelineError(f"{path} is no record of a step; write one with pipe.record = True; pipe.last_step.save.")
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
