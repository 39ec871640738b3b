"""The critical path of a step: from its last node back, each time to what made the node start.

That is the last input to arrive, or the step before it on its rank.
"""

from typing import NamedTuple

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import COMMUNICATION, Step
from zbcompile.schedules.simulation.timeline import Timeline


class CriticalStep(NamedTuple):
    """`step` ran on `rank` from `start` to `end`; `travel` is how long its result was sent to the
    next critical step.

    `overhead`, in a measured step, is what then passed on the same rank before the next step, with
    nothing missing.
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

    Times and delays add up to `timeline.finish`.

    >>> from zbcompile.schedules import build, simulate
    >>> timeline = simulate(build("gpipe", ranks=2, microbatches=1))
    >>> [str(step.step) for step in critical_path(timeline)]
    ['F0.0', 'F1.0', 'BW1.0', 'BW0.0']
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    last = [nodes[-1] for nodes in map(graph.nodes, range(timeline.schedule.ranks)) if nodes]
    node: int | None = max(last, key=end.__getitem__, default=None)
    travel: float = 0
    overhead, path = 0.0, list[CriticalStep]()
    while node is not None:
        step, rank = graph.steps[node], graph.rank(node)
        if step[0] not in COMMUNICATION or end[node] > start[node]:
            path.append(CriticalStep(rank, step, start[node], end[node], travel, overhead))
            # those of a SEND, which takes no time, go to the step that made the message
            travel = overhead = 0
        producer = timeline.blocking(node)
        if producer is not None:
            travel += start[node] - end[producer]
        elif node != graph.first[rank]:
            producer = node - 1
            overhead += start[node] - end[producer]
        node = producer
    return tuple(path[::-1])
