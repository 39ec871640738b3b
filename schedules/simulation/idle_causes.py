"""Idle time: why a rank stands still, for every gap of a simulated or measured step."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from zbcompile.amounts import plain
from zbcompile.schedules.execution.order_graph import OrderGraph, blocking
from zbcompile.schedules.ir.actions import SENDS, B, F, Step, flatten
from zbcompile.schedules.ir.kinds import result_of

ROUNDING = 1e-9  # relative: sums of the same times differ in their last bits
Cause = Literal["warm-up", "wait", "communication", "cool-down", "overhead"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Idle(NamedTuple):
    """`rank` does nothing from `start` to `end`, before it runs `step` (`None`: it has nothing left
    to do).

    `cause` is one of

    * `communication`: what `step` needs has been made and is being sent (or, in a lowered schedule,
      the rank blocks in a SEND until its receive is posted);
    * `warm-up`: the rank has not begun its first backward: the pipeline fills;
    * `cool-down`: the rank has run its last forward: the pipeline drains, until the last rank has
      finished;
    * `wait`: any other wait: the order does not fit the costs, or another rank has more work;
    * `overhead`: its inputs were ready; only in a measured step: what the host does between passes.

    `needed` on rank `source` is what `step` waits for.
    """

    rank: int
    start: float
    end: float
    cause: Cause
    step: Step | None
    needed: Step | None
    source: int | None

    def __str__(self) -> str:
        reason = "its inputs were ready"
        if self.needed:
            reason = f"waits for {self.needed} of rank {self.source}"
        elif not self.step:
            reason = "waits until the last rank has finished"
        when = f"{plain(self.start)} to {plain(self.end)}"
        return f"rank {self.rank} idle {when}: {self.cause}, {reason}"


def idle_intervals(
    graph: OrderGraph,
    rank: int,
    start: Sequence[float],
    end: Sequence[float],
    delays: Sequence[float],
) -> Iterator[Idle]:
    """Yields every interval in which `rank` stands still, between the first start and the last end
    of all ranks.

    A gap before a node is divided: the wait until its last input was made, then the time in which
    that was sent.
    """
    nodes, finish = graph.nodes(rank), max(end)
    results = {n: {result_of(action.op) for action in flatten((graph.steps[n],))} for n in nodes}
    first_backward = next((n for n in nodes if B in results[n]), graph.first[rank + 1])
    last_forward = max((n for n in nodes if F in results[n]), default=-1)
    previous: float = 0
    for n in nodes:
        if start[n] - previous > ROUNDING * finish:
            phase: Cause = (
                "warm-up" if n <= first_backward else "cool-down" if n > last_forward else "wait"
            )
            producer = blocking(graph, n, end, delays)
            parts: list[tuple[float, float, Cause]] = [(previous, start[n], "overhead")]
            if producer is not None:
                is_send = graph.steps[n][0] in SENDS
                ready = previous if is_send else min(max(end[producer], previous), start[n])
                parts = [(previous, ready, phase), (ready, start[n], "communication")]
            needed = None if producer is None else graph.steps[producer]
            source = None if producer is None else graph.rank(producer)
            for begin, stop, cause in parts:
                if stop - begin > ROUNDING * finish:
                    yield Idle(rank, begin, stop, cause, graph.steps[n], needed, source)
        previous = end[n]
    if nodes and finish - previous > ROUNDING * finish:
        yield Idle(rank, previous, finish, "cool-down", None, None, None)
