"""Lower bounds of what any order of a problem takes.

Every pass has a head (the earliest that it can begin) and a tail (the least that follows its end until the objective),
from the longest ways through its dependencies, through the passes of its own letter, and through memory: the forward
of microbatch j of a stage begins after the backward of microbatch j - K if K activations fill the rank. Then

* a rank cannot be quicker than one machine that may interrupt its passes (Jackson's preemptive schedule);
* what a rank holds, summed over time, fits under its limit for the time that it runs.

Neither assumes anything about the order, so no order is ever below them.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

from zbcompile.schedules.ir.actions import Action, B, F, S, T, W
from zbcompile.schedules.searching.problem import ROUNDING, Problem

PHASES = (F, S, T, B, W)  # of one microbatch, each after those before it


def lower_bound(problem: Problem) -> float:
    """The largest of the bounds, in the unit of the costs' times."""
    ways = _Ways(problem)
    ranks = range(problem.placement.ranks)
    by_rank: list[list[int]] = [[] for _ in ranks]
    for n, rank in enumerate(problem.rank):
        by_rank[rank].append(n)
    machines = max(_one_machine(ways, passes, problem.time) for passes in by_rank)
    longest = max(map(sum, zip(ways.head, problem.time, ways.tail, strict=False)))
    areas = max((_area(problem, ways, rank, by_rank[rank]) for rank in ranks), default=0) if problem.limits else 0
    return max(machines, longest, areas)


def busiest_rank(problem: Problem) -> float:
    """What the passes of a rank take: a bound without work."""
    busy = [0.0] * problem.placement.ranks
    for rank, time in zip(problem.rank, problem.time, strict=True):
        busy[rank] += time
    return max(busy)


class _Ways:
    """Heads and tails of all passes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        count = len(problem.waits)
        self.time = [*problem.time, *(0,) * (count - len(problem.time))]
        self.order = sorted(range(count), key=self._turn)
        self.earlier: list[list[tuple[int, float]]] = [list(waits) for waits in problem.waits]
        self._add_letters()
        for rank, limit in enumerate(problem.limits or ()):
            self._add_memory(rank, limit * ROUNDING)
        self.head = self._heads()
        self.tail = self._tails()

    def _turn(self, n: int) -> tuple[int, int, int]:
        """A place in an order in which everything comes after what it waits for."""
        actions, microbatches = self.problem.actions, self.problem.microbatches
        if n >= len(actions):
            second, m = divmod(n - len(actions), microbatches)
            return m, 2 * PHASES.index((S, T)[second]) + 1, 0
        op, stage, m = actions[n]
        return m, 2 * PHASES.index(op), stage if op == F else -stage

    def _add_letters(self) -> None:
        """Passes of one letter run one after the other on their rank."""
        letter, rank = self.problem.letter, self.problem.rank
        for n in range(1, len(self.problem.actions)):
            if letter[n] == letter[n - 1] and rank[n] == rank[n - 1]:
                self.earlier[n].append((n - 1, 0))

    def _add_memory(self, rank: int, limit: float) -> None:
        """A forward begins after the pass that frees what it needs."""
        problem, number = self.problem, self.problem.number
        for stage in problem.placement.stages_of(rank):
            mine = [m for m in range(problem.microbatches) if problem.rank[number[Action(F, stage, m)]] == rank]
            for op, at, most in _in_flight(problem, rank, stage, limit):
                for m in mine[most:]:
                    self.earlier[number[Action(F, stage, m)]].append((number[Action(op, at, m - most)], 0))

    def _heads(self) -> list[float]:
        head: list[float] = [0.0] * len(self.time)
        for n in self.order:
            head[n] = max((head[e] + self.time[e] + delay for e, delay in self.earlier[n]), default=0)
        return head

    def _tails(self) -> list[float]:
        offset, rank, passes = self.problem.offset, self.problem.rank, len(self.problem.actions)
        tail: list[float] = [offset[rank[n]] if n < passes else -math.inf for n in range(len(self.time))]
        for n in reversed(self.order):
            for e, delay in self.earlier[n]:
                tail[e] = max(tail[e], delay + self.time[n] + tail[n])
        return tail


def _in_flight(problem: Problem, rank: int, stage: int, limit: float) -> Iterator[tuple[str, int, int]]:
    """(op, other, most): at most `most` microbatches are behind the begin of F on a stage and not yet behind `op` on
    the other stage of its rank.

    Each of them holds what it has left on this and on the earlier stages of the rank. If the oldest is not behind B of
    a later stage, there is or comes a time at which it also holds all stages up to that one, before any is done here.
    """
    costs, mine = problem.costs, problem.placement.stages_of(rank)
    each = sum(costs.activation[s] for s in mine if (s <= stage and problem.placement.kind != "dual") or s == stage)
    if each <= 0:
        return
    later, many = 0.0, problem.microbatches
    for other in mine:
        if other == stage or (other > stage and problem.placement.kind != "dual"):
            later += costs.activation[other] if other > stage else 0
            yield B, other, max(1, math.floor(min(many, (limit - later) / each)))
    least = min(costs.activation[stage], costs.residue[stage])
    if least > 0:
        yield W, stage, max(1, 1 + math.floor(min(many, (limit - each) / least)))


def _one_machine(ways: _Ways, passes: Sequence[int], time: Sequence[float]) -> float:
    """Jackson's bound: always run the ready pass with the longest tail, and interrupt it for one with a longer."""
    waiting = sorted(passes, key=ways.head.__getitem__)
    ready: list[tuple[float, int, float]] = []
    now, best, index = 0.0, -math.inf, 0
    while ready or index < len(waiting):
        if not ready:
            now = max(now, ways.head[waiting[index]])
        while index < len(waiting) and ways.head[waiting[index]] <= now:
            n = waiting[index]
            heapq.heappush(ready, (-ways.tail[n], n, time[n]))
            index += 1
        tail, n, left = heapq.heappop(ready)
        until = ways.head[waiting[index]] if index < len(waiting) else math.inf
        if now + left <= until:
            now += left
            best = max(best, now - tail)
        else:
            heapq.heappush(ready, (tail, n, left - (until - now)))
            now = until
    return best


def _area(problem: Problem, ways: _Ways, rank: int, passes: Sequence[int]) -> float:
    """What microbatches must hold for the time that they must hold it, divided by what the rank can hold."""
    limit = problem.limits[rank] * ROUNDING if problem.limits else math.inf
    costs, number = problem.costs, problem.number
    area = 0.0
    for stage in problem.placement.stages_of(rank):
        mine = [m for m in range(problem.microbatches) if problem.rank[number[Action(F, stage, m)]] == rank]
        stay = _round_trip(problem, ways, stage, mine[0])
        area += len(mine) * (costs.activation[stage] * stay + costs.residue[stage] * costs.weight[stage])
    begin = min(ways.head[n] for n in passes)
    known = limit and math.isfinite(area)  # times multiplied by bytes may be more than a float can be
    return begin + area / limit + min(ways.tail[n] for n in passes) if known else 0


def _round_trip(problem: Problem, ways: _Ways, stage: int, microbatch: int) -> float:
    """The time from the begin of F of a stage to the end of its B, if nothing is in the way."""
    first, last = (problem.number[Action(op, stage, microbatch)] for op in (F, B))
    begin = {first: 0.0}
    each = len(ways.order) // problem.microbatches  # `order` goes microbatch by microbatch
    for n in ways.order[microbatch * each : (microbatch + 1) * each]:
        if any(e in begin for e, _ in problem.waits[n]):
            begin[n] = max(begin[e] + ways.time[e] + delay for e, delay in problem.waits[n] if e in begin)
    return begin[last] + problem.time[last]
