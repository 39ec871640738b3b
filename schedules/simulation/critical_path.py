"""The critical path of a step, and the chain of steps behind every idle interval.

Both go back from a moment to what made it happen: a step began either because the step before it on its rank ended or
because what it needs arrived, so every step has one step that held it up last (ties: its own rank).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from zbcompile.amounts import plain
from zbcompile.schedules.ir.actions import COMMUNICATION, GATHER, VALIDATE, Step, flatten
from zbcompile.schedules.ir.schedule import parts
from zbcompile.schedules.simulation.idle_causes import Idle
from zbcompile.schedules.simulation.timeline import Timeline


class Leg(NamedTuple):
    """`step` ran on `rank` from `start` to `end`; what it made was then on its way for `travel` to the next leg.

    `overhead`, in a measured step, is what then passed on the same rank before the next leg, with nothing missing.
    """

    rank: int
    step: Step
    start: float
    end: float
    travel: float
    overhead: float = 0

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.step}, {plain(self.start)} to {plain(self.end)}"


def critical_path(timeline: Timeline) -> tuple[Leg, ...]:
    """The chain of steps, first to last, that determines the step's length: to shorten the step, shorten one of them.

    Lengths and travel times add up to `timeline.finish`.

    >>> from zbcompile.schedules import build, simulate
    >>> [str(leg.step) for leg in critical_path(simulate(build("gpipe", ranks=2, microbatches=1)))]
    ['F0.0', 'F1.0', 'BW1.0', 'BW0.0']
    """
    run = timeline.run
    ends = [(end[-1], -rank) for rank, end in enumerate(run.end) if end]
    if not ends:
        return ()
    last = -max(ends)[1]
    return tuple(_back(timeline, last, len(run.end[last]) - 1))[::-1]


def chain(timeline: Timeline, idle: Idle) -> tuple[Leg, ...]:
    """The steps that `idle.rank` waited for, on other ranks, from first to last.

    Empty if it waited for nothing.
    """
    if idle.step is None or idle.action is None:
        return ()
    index = parts(timeline.program)[1][idle.rank].index(idle.step)
    needed = timeline.waits.held_up(idle.rank, index)
    if needed is None:
        return ()
    legs = []
    travel = timeline.run.begin[idle.rank][index] - needed.made
    for leg in _back(timeline, needed.rank, needed.step, travel):
        legs.append(leg)
        if leg.start <= idle.start:
            break
    return tuple(legs[::-1])


def _back(timeline: Timeline, rank: int, index: int, travel: float = 0) -> Iterator[Leg]:
    """Follows from one step back to the first what delayed it."""
    overhead: float = 0
    run = timeline.run
    orders = parts(timeline.program)[1]
    while True:
        start = run.begin[rank][index]
        needed = timeline.waits.held_up(rank, index)
        if needed is None and orders[rank][index][0] in (GATHER, VALIDATE):
            start = run.end[rank][index - 1] if index else 0  # it waited for the step before
        if orders[rank][index][0] not in COMMUNICATION or run.end[rank][index] > start:
            yield Leg(rank, orders[rank][index], start, run.end[rank][index], travel, overhead)
            travel = overhead = 0  # those of a SEND, which takes no time, go to the step that made the message
        if needed is not None:
            rank, index, travel = needed.rank, needed.step, travel + start - needed.made
        elif index:
            index, overhead = index - 1, overhead + start - run.end[rank][index - 1]
        else:
            return


def time_by_kind(path: Sequence[Leg]) -> dict[str, float]:
    """How much of a path each kind of step takes ("F", "B", "F|BW", ..., "messages", "overhead"), longest first."""
    total = {"messages": sum(leg.travel for leg in path), "overhead": sum(leg.overhead for leg in path)}
    for leg in path:
        kind = "|".join(action.op for action in flatten((leg.step,)))
        total[kind] = total.get(kind, 0) + leg.end - leg.start
    return {kind: time for kind, time in sorted(total.items(), key=lambda item: -item[1]) if time}


def by_rank(path: Sequence[Leg]) -> list[tuple[Leg, ...]]:
    """A path cut where it changes the rank."""
    return [tuple(legs) for _, legs in groupby(path, key=lambda leg: leg.rank)]
