"""A timeline as a trace that chrome://tracing and ui.perfetto.dev open."""

import json
from collections.abc import Iterator
from typing import Any

from zbcompile.schedules.ir.actions import flatten
from zbcompile.schedules.simulation.timeline import Timeline
from zbcompile.schedules.visualization.text import summary


def to_chrome_trace(timeline: Timeline) -> str:
    """Returns the Trace Event Format: a process named after the schedule, in it a thread per rank
    with its steps and idle intervals, a flow event per message between two steps, a counter per
    rank with its memory.

    One unit of the costs is a second if that is their unit, else a millisecond.

    >>> from zbcompile.schedules import build, simulate
    >>> import json
    >>> json.loads(to_chrome_trace(simulate(build("gpipe", 1, 1))))["traceEvents"][-1]["args"]
    {'held': 0.0}
    """
    unit = 1e6 if timeline.costs.time_unit == "s" else 1000
    step = {"step": summary(timeline)}
    return json.dumps(
        {"displayTimeUnit": "ms", "otherData": step, "traceEvents": list(_events(timeline, unit))}
    )


def _events(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    graph, ranks = timeline.graph, range(timeline.schedule.ranks)
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.schedule.name}}
    for rank in ranks:
        thread = {"ph": "M", "pid": 0, "tid": rank}
        yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}
    intervals: list[tuple[Any, str, str, dict[str, Any]]] = []
    for span in timeline.spans:
        actions = flatten((span.step,))
        category = "|".join(action.op for action in actions)
        intervals.append(
            (span, str(span.step), category, {"actions": [action._asdict() for action in actions]})
        )
    for gap in timeline.idle:
        waits = {} if gap.needed is None else {"waits for": str(gap.needed), "of rank": gap.source}
        intervals.append((gap, f"idle: {gap.cause}", "idle", waits))
    for interval, name, category, args in intervals:
        box = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": interval.rank}
        start, time = interval.start * unit, (interval.end - interval.start) * unit
        yield {**box, "ts": float(start), "dur": float(time), "args": args}
    # from the step that makes it to the one that uses it
    for number, (source, node) in enumerate(timeline.messages()):
        flow = {"name": str(graph.steps[source]), "cat": "message", "id": f"{number}", "pid": 0}
        for phase, at in (({"ph": "s"}, source), ({"ph": "f", "bp": "e"}, node)):
            middle = (timeline.start[at] + timeline.end[at]) / 2
            yield {**phase, **flow, "tid": graph.rank(at), "ts": float(middle * unit)}
    for rank in ranks:
        for time, amount in timeline.memory_curve(rank):
            counter = {"ph": "C", "name": f"memory of rank {rank}", "pid": 0}
            yield {**counter, "args": {"held": float(amount)}, "ts": float(time * unit)}
