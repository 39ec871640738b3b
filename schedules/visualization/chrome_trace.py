"""A timeline as a trace that chrome://tracing and ui.perfetto.dev open."""

import json
from collections.abc import Iterator
from typing import Any

from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.text import summary


def to_chrome_trace(timeline: Timeline, microseconds: float = 1000) -> str:
    """Trace Event Format: a process named after the schedule, in it a thread per rank with its steps and idle
    intervals, a flow event per message between two steps, a counter per rank with its memory.

    `microseconds`: how long one unit of the costs is.

    >>> from zbcompile.schedules import build, simulate
    >>> import json
    >>> json.loads(to_chrome_trace(simulate(build("gpipe", 1, 1))))["traceEvents"][-1]["args"]
    {'held': 0}
    """
    events = list(_events(timeline, microseconds))
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"step": summary(timeline)}, "traceEvents": events})


def _events(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.schedule.name}}
    for rank in range(timeline.schedule.ranks):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}
    for span in timeline.spans:
        actions = flatten((span.step,))
        category = "|".join(action.op for action in actions)
        places = [{"op": a.op, "stage": a.stage, "microbatch": a.microbatch} for a in actions]
        yield _interval(str(span.step), category, span.rank, span.start, span.end, unit, {"actions": places})
    for gap in timeline.idle:
        waits = {} if gap.action is None else {"waits for": str(gap.action), "of rank": gap.source}
        yield _interval(f"idle: {gap.cause}", "idle", gap.rank, gap.start, gap.end, unit, waits)
    yield from _flows(timeline, unit)
    for rank in range(timeline.schedule.ranks):
        for time, amount in timeline.memory_curve(rank):
            held = {"held": _number(amount)}
            yield {"ph": "C", "name": f"memory of rank {rank}", "pid": 0, "ts": _number(time * unit), "args": held}


def _flows(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    """Yields an arrow from each step that makes a message to the step that uses it."""
    graph = timeline.graph
    for number, (source, node) in enumerate(timeline.messages()):
        name = {"name": str(graph.steps[source]), "cat": "message", "id": f"{number}", "pid": 0}
        for phase, at in (({"ph": "s"}, source), ({"ph": "f", "bp": "e"}, node)):
            middle = (timeline.start[at] + timeline.end[at]) / 2
            yield {**phase, **name, "tid": graph.rank(at), "ts": _number(middle * unit)}


def _interval(
    name: str, category: str, rank: int, start: float, end: float, unit: float, extra: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": _number(start * unit), "dur": _number((end - start) * unit)}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, **times, "args": extra}


def _number(value: Any) -> int | float:
    return value if isinstance(value, int) else float(value)
