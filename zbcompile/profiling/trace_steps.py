"""`zbcompile.trace`: the steps of all ranks and replicas as one trace for chrome://tracing and ui.perfetto.dev."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zbcompile.profiling.observation import ObservedPipeline
from zbcompile.program.step_record import StepRecord
from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.visualization.chrome_trace import flows

Event = dict[str, Any]


@contextmanager
def trace(pipe: ObservedPipeline, path: str | Path) -> Iterator[None]:
    """Record the steps inside and write them to `path` (JSON), on one clock for all ranks. Every rank must enter it;
    the first one writes. Nothing is written if the block raises.

    >>> with zbcompile.trace(pipe, "steps.json"):               # doctest: +SKIP
    ...     for _ in range(3):
    ...         pipe.step(inputs, target=targets)
    """
    with pipe.observation.recording() as records:
        yield
    replicas = pipe.from_replicas(records)
    if pipe.ranks.is_first:
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(replicas))}))


def events(replicas: Sequence[Sequence[StepRecord]]) -> Iterator[Event]:
    """Trace Event Format: a process per replica, a thread per rank, a flow per message, a counter of what waits."""
    zero = min((record.started for records in replicas for record in records), default=0.0)
    for replica, records in enumerate(replicas):
        yield {"ph": "M", "name": "process_name", "pid": replica, "args": {"name": f"replica {replica}"}}
        for rank in records[0].spans if records else ():
            yield {"ph": "M", "name": "thread_name", "pid": replica, "tid": rank, "args": {"name": f"rank {rank}"}}
        for index, record in enumerate(records):
            yield from _step_events(record, index, replica, record.started - zero)
            yield from _messages(record, index, replica, record.started - zero)


def _messages(record: StepRecord, index: int, replica: int, offset: float) -> Iterator[Event]:
    """Arrows between passes, which a timeline counts from its first one."""
    (first, *_), timeline = flatten((record.schedule.orders[0][0],)), record.timeline
    start = next(span.start for span in record.spans[0] if span.action == str(first)) - timeline.run.begin[0][0]
    yield from flows(timeline, 1e6, offset + start, replica, f"{replica}.{index}.")


def _step_events(record: StepRecord, index: int, replica: int, offset: float) -> Iterator[Event]:
    for rank, spans in record.spans.items():
        for span, held in zip(spans, record.held_bytes[rank], strict=True):
            op = span.action.rstrip("0123456789.")
            start, duration = (offset + span.start) * 1e6, (span.end - span.start) * 1e6
            place = {"pid": replica, "tid": rank, "ts": start, "args": {"step": index}}
            yield {"ph": "X", "name": span.action, "cat": op, "dur": duration, **place}
            counter = {"ph": "C", "name": f"waiting for B and W, rank {rank}", "pid": replica}
            yield {**counter, "ts": start + duration, "args": {"bytes": held}}
