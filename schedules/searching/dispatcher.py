"""List scheduling, forward or backward in time: a free rank runs the most urgent pass that its
memory admits."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from zbcompile.schedules.ir.actions import B, F
from zbcompile.schedules.searching.problem import ROUNDING, Order, SchedulingProblem


class DispatchedOrder(NamedTuple):
    """The passes of each rank in the order in which they start, the end of each pass, and the
    objective."""

    order: Order
    end: list[float]
    value: float


class Direction:
    """The scheduling problem, optionally time-reversed.

    In the reversed problem all dependencies are inverted, a pass allocates what it frees in the
    original, and each rank starts after its offset.
    """

    def __init__(self, problem: SchedulingProblem, backward: bool) -> None:
        self.problem, self.step = problem, -1 if backward else 1
        ranks, passes = range(problem.placement.ranks), len(problem.actions)
        self.after, before = (
            (problem.inputs, problem.users) if backward else (problem.users, problem.inputs)
        )
        self.missing = [*map(len, before)]
        for n in range(passes, len(self.missing)):
            # nothing waits for all shards: they need not wait for each other backward
            if not self.missing[n]:
                for user, _ in self.after[n]:
                    self.missing[user] -= 1
        self.added = [self.step * size for size in problem.added]
        self.begin: list[float] = list(problem.offset) if backward else [0 for _ in ranks]
        self.offset = [0 for _ in ranks] if backward else problem.offset
        self.frees = [op == (F if backward else B) for op, _, _ in problem.actions]
        # passes of one rank, operation and stage keep their order
        classes: dict[tuple[int, str, int], list[int]] = {}
        for n in range(passes)[:: self.step]:
            op, stage, _ = problem.actions[n]
            classes.setdefault((problem.rank[n], op, stage), []).append(n)
        self.heads = [
            [same[0] for (r, *_), same in sorted(classes.items()) if r == rank] for rank in ranks
        ]
        self.following = [-1] * passes
        for same in classes.values():
            for n, following in pairwise(same):
                self.following[n] = following

    def dispatch(self, priority: Sequence[float], patience: float) -> DispatchedOrder | None:
        """Lets every free rank run, of the passes that it can start soon, the one with the lowest
        priority.

        It leaves time for one that has not arrived, up to `patience` times the time in which the
        first of the others could end. Returns None if memory admits no order.
        """
        return _Dispatch(self, priority, patience).result()


class _Dispatch:
    """One run of the list scheduler.

    With limits a pass starts only if the oldest microbatch can still be finished on its rank, which
    therefore always proceeds (the banker's algorithm), and if it leaves the memory that more urgent
    passes of its rank need.
    """

    def __init__(self, direction: Direction, priority: Sequence[float], patience: float) -> None:
        self.direction, self.priority, self.patience = direction, priority, patience
        problem = direction.problem
        self.time, self.rank, self.added = problem.time, problem.rank, [*direction.added, 0]
        self.missing, self.heads = direction.missing[:], [heads[:] for heads in direction.heads]
        self.arrival = [-math.inf] * len(self.missing)
        self.end: list[float] = [0] * len(self.missing)
        self.free = direction.begin[:]
        self.wakes = [(time, rank) for rank, time in enumerate(self.free)]
        heapify(self.wakes)
        self.limits = [limit * ROUNDING for limit in problem.limits or ()]
        ranks, microbatches = problem.placement.ranks if self.limits else 0, problem.microbatches
        self.memory: list[float] = [0] * ranks
        # what forwards will add
        self.owed: list[list[float]] = [[0] * microbatches for _ in range(ranks)]
        self.open = [[0] * microbatches for _ in range(ranks)]  # passes that free it, not yet run
        self.oldest = [0 if direction.step > 0 else microbatches - 1] * ranks
        self.microbatch = [m for _, _, m in problem.actions]
        for n, rank in enumerate(self.rank if self.limits else ()):
            self.owed[rank][self.microbatch[n]] += max(self.added[n], 0)
            self.open[rank][self.microbatch[n]] += direction.frees[n]

    def result(self) -> DispatchedOrder | None:
        order: Order = [[] for _ in self.free]
        while self.wakes:
            now, rank = heappop(self.wakes)
            if self.free[rank] <= now and (choice := self._choose(now, rank)):
                begin, n, place = choice
                if begin > now:
                    heappush(self.wakes, (begin, rank))
                else:
                    order[rank].append(n)
                    self.heads[rank][place] = self.direction.following[n]
                    self._start(now, rank, n)
        if sum(map(len, order)) < len(self.rank):
            return None
        return DispatchedOrder(
            order, self.end, max(map(sum, zip(self.free, self.direction.offset, strict=True)))
        )

    def _choose(self, now: float, rank: int) -> tuple[float, int, int] | None:
        """Returns start, number and place among the rank's heads of the pass to run next; None if
        none can start."""
        time, missing, arrival, priority = self.time, self.missing, self.arrival, self.priority
        choices: list[tuple[float, float, int, int]] = []
        first = ended = math.inf
        for place, n in enumerate(self.heads[rank]):
            if (
                n < 0
                or missing[n]
                or (self.limits and self.added[n] > 0 and not self._admits(n, rank))
            ):
                continue
            begin = arrival[n] if arrival[n] > now else now
            first, ended = min(first, begin), min(ended, begin + time[n])
            choices.append((priority[n], begin, n, place))
        if not choices:
            return None
        # which rounding could make earlier
        latest = max(first, first + self.patience * (ended - first))
        return min(choice for choice in choices if choice[1] <= latest)[1:]

    def _admits(self, n: int, rank: int) -> bool:
        memory, limit, oldest, added = (
            self.memory[rank] + self.added[n],
            self.limits[rank],
            self.oldest[rank],
            self.added,
        )
        if memory > limit or self.microbatch[n] == oldest:
            return memory <= limit
        priority = self.priority
        urgent = sum(
            [
                added[head]
                for head in self.heads[rank]
                if added[head] > 0 and priority[head] < priority[n]
            ]
        )
        return memory + max(urgent, self.owed[rank][oldest]) <= limit

    def _start(self, now: float, rank: int, n: int) -> None:
        self.free[rank] = self.end[n] = ended = now + self.time[n]
        if self.limits:
            self.memory[rank] += self.added[n]
            self.owed[rank][self.microbatch[n]] -= max(self.added[n], 0)
            self.open[rank][self.microbatch[n]] -= self.direction.frees[n]
            step, open_ = self.direction.step, self.open[rank]
            while not open_[self.oldest[rank]] and 0 <= self.oldest[rank] + step < len(open_):
                self.oldest[rank] += step
        heappush(self.wakes, (ended, rank))
        done = [(n, ended)]
        for producer, end in done:
            for user, delay in self.direction.after[producer]:
                arrival = self.arrival[user] = max(self.arrival[user], end + delay)
                self.missing[user] -= 1
                if not self.missing[user] and user >= len(self.rank):
                    done.append((user, arrival))
                elif (
                    not self.missing[user]
                    and self.rank[user] != rank
                    and self.free[self.rank[user]] <= arrival
                ):
                    heappush(self.wakes, (max(now, self.free[self.rank[user]]), self.rank[user]))
