"""The critical path of a step, and the chain of steps behind every idle interval.

Both go back from a node to what made it start: the last input to arrive, or the step before it on its rank.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import COMMUNICATION, Step, flatten
from zbcompile.schedules.simulation.idle_causes import Idle
from zbcompile.schedules.simulation.timeline import Timeline


class CriticalStep(NamedTuple):
    """`step` ran on `rank` from `start` to `end`; its result then travelled for `travel` to the next critical step.

    `overhead`, in a measured step, is what then passed on the same rank before the next step, with nothing missing.
    """

    rank: int
    step: Step
    start: float
    end: float
    travel: float
    overhead: float = 0

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.step}, {plain(self.start)} to {plain(self.end)}"


def critical_path(timeline: Timeline) -> tuple[CriticalStep, ...]:
    """Returns the chain of steps, first to last, that determines the step's length.

    Times and travel times add up to `timeline.finish`.

    >>> from zbcompile.schedules import build, simulate
    >>> [str(leg.step) for leg in critical_path(simulate(build("gpipe", ranks=2, microbatches=1)))]
    ['F0.0', 'F1.0', 'BW1.0', 'BW0.0']
    """
    graph, end = timeline.graph, timeline.end
    last = [nodes[-1] for nodes in map(graph.nodes, range(timeline.schedule.ranks)) if nodes]
    return tuple(_back(timeline, max(last, key=end.__getitem__)))[::-1] if last else ()


def blocking_chain(timeline: Timeline, idle: Idle) -> tuple[CriticalStep, ...]:
    """Returns the steps that `idle.rank` waited for, on other ranks, from first to last.

    Empty if it waited for nothing.
    """
    graph = timeline.graph
    if idle.step is None or idle.action is None:
        return ()
    node = next(n for n in graph.nodes(idle.rank) if graph.steps[n] == idle.step)
    made = timeline.blocking(node)
    if made is None:
        return ()
    steps = []
    for step in _back(timeline, made, timeline.start[node] - timeline.end[made]):
        steps.append(step)
        if step.start <= idle.start:
            break
    return tuple(steps[::-1])


def _back(timeline: Timeline, node: int, travel: float = 0) -> Iterator[CriticalStep]:
    """Follows from one node back to the first what delayed it."""
    graph, start, end, overhead = timeline.graph, timeline.start, timeline.end, 0.0
    while True:
        step, rank = graph.steps[node], graph.rank(node)
        if step[0] not in COMMUNICATION or end[node] > start[node]:
            yield CriticalStep(rank, step, start[node], end[node], travel, overhead)
            travel = overhead = 0  # those of a SEND, which takes no time, go to the step that made the message
        made = timeline.blocking(node)
        if made is not None:
            node, travel = made, travel + start[node] - end[made]
        elif node != graph.first[rank]:
            node, overhead = node - 1, overhead + start[node] - end[node - 1]
        else:
            return


def time_by_kind(path: Sequence[CriticalStep]) -> dict[str, float]:
    """Returns how much of a path each kind of step takes ("F", "F|BW", ..., "messages", "overhead"), longest first."""
    total = {"messages": sum(step.travel for step in path), "overhead": sum(step.overhead for step in path)}
    for each in path:
        kind = "|".join(action.op for action in flatten((each.step,)))
        total[kind] = total.get(kind, 0) + each.end - each.start
    return {kind: time for kind, time in sorted(total.items(), key=lambda item: -item[1]) if time}


def by_rank(path: Sequence[CriticalStep]) -> list[tuple[CriticalStep, ...]]:
    """Returns a path cut where it changes the rank."""
    return [tuple(steps) for _, steps in groupby(path, key=lambda step: step.rank)]
