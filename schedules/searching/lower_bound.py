"""Lower bounds of what any order of a problem takes.

Every pass has a head (the earliest that it can begin) and a tail (the least that follows its end until the objective),
from the longest ways through its dependencies, through the passes of its own letter, and through memory: the forward
of microbatch j of a stage begins after the backward of microbatch j - K if K activations fill the rank. All that such
ways say has to come before a pass on its own rank takes time there, too: the head is no earlier than the end of that
work, and the tail no shorter than the work that has to follow. Then

* a rank cannot be quicker than one machine that may interrupt its passes (Jackson's preemptive schedule);
* what a rank holds, summed over time, fits under its limit for the time that it runs.

Neither assumes anything about the order, so no order is ever below them.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from zbcompile.schedules.ir.actions import Action, B, F, S, T, W
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.searching.problem import LARGE, ROUNDING, Problem

PHASES = (F, S, T, B, W)  # of one microbatch, each after those before it
Edges = list[list[tuple[int, float]]]  # by pass: what it waits for, or what waits for it, and for how long
Letter = tuple[int, int]  # of the passes of one rank: the rank, and the number of the letter
Work = dict[Letter, list[tuple[int, int, int]]]  # by letter: another one of its rank, see `_work_around`


def lower_bound(problem: Problem, quick: bool = False) -> float:
    """The largest of the bounds, in the unit of the costs' times; if it has to be `quick`, the busiest rank's work."""
    by_rank: list[list[int]] = [[] for _ in range(problem.placement.ranks)]
    for n, rank in enumerate(problem.rank):
        by_rank[rank].append(n)
    if quick:
        return max(sum(map(problem.time.__getitem__, passes)) for passes in by_rank)
    ways = _Ways(problem)
    machines = (_one_machine(ways, passes, problem.time) for passes in by_rank)
    areas = (_area(problem, ways, rank, limit, by_rank[rank]) for rank, limit in enumerate(problem.limits or ()))
    return max((*machines, *areas))


class _Ways:
    """Heads and tails of all passes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        more = len(problem.waits) - len(problem.actions)  # "every shard has run it", which is on no rank
        self.time = [*problem.time, *(0,) * more]
        order = sorted(range(len(self.time)), key=self._turn)
        self.letters = [(r, n // problem.microbatches) for n, r in enumerate((*problem.rank, *(-1,) * more))]
        earlier: Edges = [list(waits) for waits in problem.waits]
        for n in range(1, len(problem.actions)):  # passes of one letter run one after the other on their rank
            if self.letters[n] == self.letters[n - 1]:
                earlier[n].append((n - 1, 0))
        for rank, limit in enumerate(problem.limits or ()):
            self._add_memory(earlier, rank, limit * ROUNDING)
        later: Edges = [[] for _ in earlier]
        for n, edges in enumerate(earlier):
            for e, delay in edges:
                later[e].append((n, delay))
        before, after = _work_around(self.letters, earlier if len(problem.time) <= LARGE else [[]] * len(earlier))
        offsets = [*map(problem.offset.__getitem__, problem.rank), *(-math.inf,) * more]
        self.head = self._least(order, earlier, before, [0] * len(earlier))
        self.tail = self._least(order[::-1], later, after, offsets)

    def _turn(self, n: int) -> tuple[int, int, int]:
        """A place in an order in which everything comes after what it waits for."""
        actions, microbatches = self.problem.actions, self.problem.microbatches
        if n >= len(actions):
            second, m = divmod(n - len(actions), microbatches)
            return m, 2 * PHASES.index((S, T)[second]) + 1, 0
        op, stage, m = actions[n]
        return m, 2 * PHASES.index(op), stage if op == F else -stage

    def _add_memory(self, earlier: Edges, rank: int, limit: float) -> None:
        """A forward begins after the pass that frees what it needs."""
        problem, number = self.problem, self.problem.number
        for stage in problem.placement.stages_of(rank):
            mine = [m for m in range(problem.microbatches) if problem.rank[number[Action(F, stage, m)]] == rank]
            for op, at, most, delay in _in_flight(problem, rank, stage, limit):
                for m in mine[most:]:
                    earlier[number[Action(F, stage, m)]].append((number[Action(op, at, m - most)], delay))

    def _least(self, order: Sequence[int], edges: Edges, work: Work, least: list[float]) -> list[float]:
        """What precedes each pass: no less than `least`, and than what it waits for and the work of its rank take."""
        time, machines = self.time, {letter: _Machine() for letter in work}
        for n in order:
            machine, precedes = machines[self.letters[n]], least[n]
            for e, delay in edges[n]:
                precedes = max(precedes, least[e] + time[e] + delay)
            for apart, first, last in work[self.letters[n]]:
                if first <= n + apart <= last:
                    machine.run(least[n + apart], time[n + apart])
            least[n] = max(precedes, machine.end)
        return least


class _Machine:
    """When a rank is busy that runs every pass as soon as it can begin: stretches of time, in order."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.end = -math.inf

    def run(self, begin: float, time: float) -> None:
        begins, ends = self.begins, self.ends
        at = bisect_right(begins, begin)
        if at and ends[at - 1] >= begin:
            at -= 1
            ends[at] += time
        else:
            begins.insert(at, begin)
            ends.insert(at, begin + time)
        while at + 1 < len(ends) and begins[at + 1] <= ends[at]:  # what it runs into moves behind it
            ends[at] += ends.pop(at + 1) - begins.pop(at + 1)
        self.end = ends[-1]


def _work_around(letters: Sequence[Letter], edges: Edges) -> tuple[Work, Work]:
    """For each letter, the letters of its rank that come before its passes on some way, and those that come after: how
    far away the next such pass is, in numbers, and the first and the last pass of that letter.

    What microbatch j of a letter waits for is microbatch j - lag of another, with the same lag for all j.
    """
    first = {letter: n for n, letter in reversed([*enumerate(letters)])}
    last = {letter: n for n, letter in enumerate(letters)}
    waits: dict[Letter, dict[Letter, int]] = {letter: {} for letter in first}
    for n, (letter, earlier) in enumerate(zip(letters, edges, strict=True)):
        for e, _ in earlier:
            lag, others = n - first[letter] - e + first[letters[e]], waits[letter]
            others[letters[e]] = min(lag, others.get(letters[e], lag))
    before: Work = {letter: [] for letter in first}
    after: Work = {letter: [] for letter in first}
    for letter in first:
        for other, lag in _lags(letter, waits).items():
            if other[0] == letter[0] >= 0:
                apart = first[letter] - first[other] + lag
                before[letter].append((-apart, first[other], last[other]))
                after[other].append((apart, first[letter], last[letter]))
    return before, after


def _lags(letter: Letter, waits: Mapping[Letter, Mapping[Letter, int]]) -> dict[Letter, int]:
    """The least lag behind every letter that this one waits for on some way; behind itself that is one microbatch."""
    found: dict[Letter, int] = {}
    heap = [(lag, other) for other, lag in waits[letter].items()]
    heapq.heapify(heap)
    while heap:
        lag, other = heapq.heappop(heap)
        if other not in found:
            found[other] = lag
            for further, more in waits[other].items():
                heapq.heappush(heap, (lag + more, further))
    return found


def _in_flight(problem: Problem, rank: int, stage: int, limit: float) -> Iterator[tuple[str, int, int, float]]:
    """(op, other, most, delay): at most `most` microbatches are behind the begin of F on a stage and not yet behind
    `op` on a stage of its rank; the next F begins a delay after that.

    While B of a stage is to come, a microbatch holds that and the earlier stages of the rank; if B of a later stage is
    to come, there is or comes a time at which the oldest one also holds all up to that one, before any is done here.
    """
    costs, many = problem.costs, problem.microbatches
    mine = (stage,) if problem.placement.kind == "dual" else problem.placement.stages_of(rank)
    held = dict(zip(mine, accumulate(costs.activation[s] for s in mine), strict=True))
    for other in mine:
        least, most = held[min(stage, other)], held[max(stage, other)]
        for op, each, own in ((B, least, most), (W, min(least, costs.residue[other]), held[stage])):
            if each > 0:
                most = 1 + max(0, math.floor(min(many, (limit - own) / each)))
                tight = op == B and other == stage and most < many
                yield op, other, most, _work_between(costs, mine, stage, most, limit) if tight else 0


def _work_between(costs: Costs, mine: Sequence[int], stage: int, most: int, limit: float) -> float:
    """How long a rank works from B of microbatch j of a stage to F of microbatch j + `most`.

    It frees memory: that of j or, after more Bs, that of several. And on an earlier stage of the rank, F of j + `most`
    comes after that B, too; or it comes before, and leaves room for so few others that these have their F of this
    stage after that B.
    """
    earlier = mine[: mine.index(stage)]
    held = sum(costs.activation[s] for s in (*earlier, stage))
    left = held - costs.activation[stage] + costs.residue[stage]
    freeing = [(costs.residue[s], costs.weight[s]) for s in (*earlier, stage)]
    freeing += [(costs.activation[s] - costs.residue[s], costs.backward[s]) for s in earlier]
    freeing = [(size, time) for size, time in freeing if size > 0]

    def freed(more: int) -> float:
        excess = (most - more) * held + (more + 1) * left - limit
        if excess <= 0 or not freeing:
            return more * costs.backward[stage]
        least = min(time and excess / size * time for size, time in freeing)
        return more * costs.backward[stage] + max(least, min(time for _, time in freeing))

    forward: float = 0
    for s, before in zip(earlier, accumulate(costs.activation[s] for s in earlier), strict=True):
        others = math.floor((limit - (most + 1) * before) / (held - before)) if held > before else most
        more = (most - others) * costs.forward[stage] if others >= 1 else costs.forward[s]
        forward = max(forward, min(costs.forward[s], more))
    return min(map(freed, range(most))) + forward


def _one_machine(ways: _Ways, passes: Sequence[int], time: Sequence[float]) -> float:
    """Jackson's bound: always run the ready pass with the longest tail, and interrupt it for one with a longer."""
    waiting = sorted(passes, key=ways.head.__getitem__)
    ready: list[tuple[float, int, float]] = []
    now: float = 0
    best, index = -math.inf, 0
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


def _area(problem: Problem, ways: _Ways, rank: int, limit: float, passes: Sequence[int]) -> float:
    """What microbatches must hold for the time that they must hold it, divided by what the rank can hold."""
    costs, number = problem.costs, problem.number
    area = 0.0
    for stage in problem.placement.stages_of(rank):
        mine = [m for m in range(problem.microbatches) if problem.rank[number[Action(F, stage, m)]] == rank]
        first, last = (number[Action(op, stage, mine[0])] for op in (F, B))
        stay = ways.head[last] + problem.time[last] - ways.head[first]  # nothing is in the way of the first microbatch
        area += len(mine) * (costs.activation[stage] * stay + costs.residue[stage] * costs.weight[stage])
    begin = min(ways.head[n] for n in passes)
    known = limit and math.isfinite(area)  # times multiplied by bytes may be more than a float can be
    return begin + area / (limit * ROUNDING) + min(ways.tail[n] for n in passes) if known else 0
