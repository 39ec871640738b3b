"""List scheduling, forward or backward in time: a free rank runs the most urgent pass that its memory admits."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from zbcompile.schedules.ir.actions import B, F
from zbcompile.schedules.searching.problem import ROUNDING, Order, SchedulingProblem


class DispatchedOrder(NamedTuple):
    """The passes of each rank in the order in which they start, the end of each pass, and the objective."""

    order: Order
    end: list[float]
    value: float


class Direction:
    """The scheduling problem, optionally time-reversed.

    In the reversed problem all dependencies are inverted, a pass allocates what it frees in the original, and each rank
    starts after its offset.
    """

    def __init__(self, problem: SchedulingProblem, backward: bool) -> None:
        self.problem, self.backward = problem, backward
        ranks, passes = problem.placement.ranks, len(problem.actions)
        self.after: list[list[tuple[int, float]]] = [[] for _ in problem.inputs]
        self.missing = [0] * len(problem.inputs)
        for user, inputs in enumerate(problem.inputs):
            for made, delay in inputs:
                first, then = (user, made) if backward else (made, user)
                self.after[first].append((then, delay))
                self.missing[then] += 1
        for n in range(passes, len(self.missing)):
            if not self.missing[n]:  # nothing waits for all shards: they need not wait for each other backward
                for user, _ in self.after[n]:
                    self.missing[user] -= 1
        self.added = [-size for size in problem.added] if backward else list(problem.added)
        self.begin: list[float] = list(problem.offset) if backward else [0] * ranks
        self.offset = [0] * ranks if backward else problem.offset
        classes: dict[tuple[int, str, int], list[int]] = {}  # passes of one rank, operation and stage keep their order
        for n in range(passes)[:: -1 if backward else 1]:
            op, stage, _ = problem.actions[n]
            classes.setdefault((problem.rank[n], op, stage), []).append(n)
        self.heads = [[own[0] for (r, *_), own in sorted(classes.items()) if r == rank] for rank in range(ranks)]
        self.following = [-1] * passes
        for own in classes.values():
            for n, other in pairwise(own):
                self.following[n] = other

    def dispatch(self, priority: Sequence[float], patience: float) -> DispatchedOrder | None:
        """Lets every free rank run, of the passes that it can start soon, the one with the lowest priority.

        It waits for one that has not arrived up to `patience` times the time in which the first of the others could
        end. Returns None if memory admits no order.
        """
        return _Dispatch(self, priority, patience).result()


class _Memory:
    """What ranks hold. A pass starts only if the oldest microbatch can still be finished on its rank, which therefore
    always proceeds (the banker's algorithm), and if it leaves the memory that more urgent passes of its rank need."""

    def __init__(self, way: Direction) -> None:
        problem = way.problem
        ranks, microbatches = problem.placement.ranks, problem.microbatches
        self.added, self.step = [*way.added, 0], -1 if way.backward else 1
        self.limit = [limit * ROUNDING for limit in problem.limits or ()]
        self.held: list[float] = [0] * ranks
        self.owed: list[list[float]] = [[0] * microbatches for _ in range(ranks)]
        self.open = [[0] * microbatches for _ in range(ranks)]  # passes that free it, not yet run
        self.oldest = [microbatches - 1 if way.backward else 0] * ranks
        self.microbatch = [m for _, _, m in problem.actions]
        self.frees = [op == (F if way.backward else B) for op, _, _ in problem.actions]
        for n, (rank, added) in enumerate(zip(problem.rank, way.added, strict=True)):
            self.owed[rank][self.microbatch[n]] += max(added, 0)
            self.open[rank][self.microbatch[n]] += self.frees[n]

    def admits(self, n: int, rank: int, heads: Sequence[int], priority: Sequence[float]) -> bool:
        held, limit, oldest, added = self.held[rank] + self.added[n], self.limit[rank], self.oldest[rank], self.added
        if held > limit or self.microbatch[n] == oldest:
            return held <= limit
        urgent = sum([added[other] for other in heads if added[other] > 0 and priority[other] < priority[n]])
        return held + max(urgent, self.owed[rank][oldest]) <= limit

    def take(self, n: int, rank: int) -> None:
        m, added, open_ = self.microbatch[n], self.added[n], self.open[rank]
        self.held[rank] += added
        self.owed[rank][m] -= max(added, 0)
        open_[m] -= self.frees[n]
        while not open_[self.oldest[rank]] and 0 <= self.oldest[rank] + self.step < len(open_):
            self.oldest[rank] += self.step


class _Dispatch:
    def __init__(self, way: Direction, priority: Sequence[float], patience: float) -> None:
        self.way, self.priority, self.patience = way, priority, patience
        self.time, self.rank = way.problem.time, way.problem.rank
        self.missing, self.heads = way.missing[:], [heads[:] for heads in way.heads]
        self.arrival = [-math.inf] * len(self.missing)
        self.end: list[float] = [0] * len(self.missing)
        self.free = way.begin[:]
        self.memory = _Memory(way) if way.problem.limits else None
        self.wakes = [(time, rank) for rank, time in enumerate(self.free)]
        heapify(self.wakes)

    def result(self) -> DispatchedOrder | None:
        order: Order = [[] for _ in self.free]
        wakes, free, priority = self.wakes, self.free, self.priority
        while wakes:
            now, rank = heappop(wakes)
            if free[rank] > now:
                continue
            choice = self._choice(now, rank, priority)
            if choice is None:
                continue
            begin, n, place = choice
            if begin > now:
                heappush(wakes, (begin, rank))
                continue
            order[rank].append(n)
            self._start(now, rank, n, place)
        if sum(map(len, order)) < len(self.rank):
            return None
        return DispatchedOrder(order, self.end, max(map(sum, zip(free, self.way.offset, strict=True))))

    def _choice(self, now: float, rank: int, priority: Sequence[float]) -> tuple[float, int, int] | None:
        """Begin, number and place among the rank's heads of the pass to run next; None if none can begin."""
        time, missing, arrival, memory, added = self.time, self.missing, self.arrival, self.memory, self.way.added
        known: list[tuple[float, float, int, int]] = []
        first = ended = 0.0
        for place, n in enumerate(self.heads[rank]):
            if n < 0 or missing[n]:
                continue
            if memory and added[n] > 0 and not memory.admits(n, rank, self.heads[rank], priority):
                continue
            begin = arrival[n] if arrival[n] > now else now
            if not known or begin < first:
                first = begin
            if not known or begin + time[n] < ended:
                ended = begin + time[n]
            known.append((priority[n], begin, n, place))
        if not known:
            return None
        latest = max(first, first + self.patience * (ended - first))  # which rounding could make earlier
        _, begin, n, place = min(each for each in known if each[1] <= latest)
        return begin, n, place

    def _start(self, now: float, rank: int, n: int, place: int) -> None:
        self.heads[rank][place] = self.way.following[n]
        self.free[rank] = self.end[n] = ended = now + self.time[n]
        if self.memory:
            self.memory.take(n, rank)
        heappush(self.wakes, (ended, rank))
        done = [(n, ended)]
        for made, end in done:
            for user, delay in self.way.after[made]:
                arrival = end + delay
                if arrival > self.arrival[user]:
                    self.arrival[user] = arrival
                self.missing[user] -= 1
                if not self.missing[user]:
                    if user >= len(self.rank):
                        done.append((user, self.arrival[user]))
                    elif self.rank[user] != rank and self.free[self.rank[user]] <= self.arrival[user]:
                        heappush(self.wakes, (max(now, self.free[self.rank[user]]), self.rank[user]))
