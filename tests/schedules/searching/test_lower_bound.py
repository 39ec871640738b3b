"""The bound: no order at all is below it."""

import math
import random
from collections.abc import Iterator

import pytest

from zbcompile.schedules import Costs
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.searching.order_search import scheduling_problems
from zbcompile.schedules.searching.problem import ROUNDING, SchedulingProblem


def drawn(number: int) -> SchedulingProblem:
    """Two ranks, few microbatches, and mostly just enough memory: small enough to try every
    order."""
    any_ = random.Random(number)
    placement = any_.choice(("linear", "v", "looped:2"))
    chunks = 1 if placement == "linear" else 2
    several = [tuple(any_.choice((1, 2, 3, 5)) for _ in range(2 * chunks)) for _ in range(5)]
    residue = any_.choice((several[4], (0,) * 2 * chunks))
    costs = Costs(*several[:3], activation=several[3], residue=residue, comm=1)
    counts = costs, 2, 4 - chunks
    (idle_from,) = scheduling_problems(*counts, None, [placement], True, 1)
    peak = max(peak_memory(idle_from.sequential, costs))
    limit = any_.choice((None, peak, 1.5 * peak, 2 * peak))
    return scheduling_problems(*counts, limit, [placement], any_.random() < 0.5, 1)[0]


def orders_below(problem: SchedulingProblem, value: float) -> Iterator[float]:
    """The objective of every order that is shorter than `value`: begins are tried in order
    of time."""
    limits = problem.limits or (math.inf,) * problem.placement.ranks
    end: dict[int, float] = {-1: 0.0}  # before the first microbatch
    memory, idle_from, work = ([0.0] * len(limits) for _ in range(3))
    for time, rank in zip(problem.time, problem.rank, strict=True):
        work[rank] += time
    before = {
        n: problem.number.get(a._replace(microbatch=a.microbatch - 1), -1)
        for n, a in enumerate(problem.actions)
    }

    def is_ready(n: int) -> bool:
        room = limits[problem.rank[n]] * ROUNDING - memory[problem.rank[n]]
        inputs = all(producer in end for producer, _ in problem.inputs[n])
        return n not in end and before[n] in end and inputs and problem.added[n] <= room

    def further(now: float) -> Iterator[float]:
        lengths = list(zip(idle_from, work, problem.offset, strict=True))
        if any(sum(each) >= value for each in lengths):
            return
        if len(end) == len(problem.actions) + 1:
            yield max(idle + offset for idle, _, offset in lengths)
        for n in filter(is_ready, range(len(problem.actions))):
            rank = problem.rank[n]
            arrivals = (end[producer] + delay for producer, delay in problem.inputs[n])
            at = max([idle_from[rank], *arrivals])
            if at >= now:
                was = idle_from[rank]
                end[n] = idle_from[rank] = at + problem.time[n]
                memory[rank] += problem.added[n]
                work[rank] -= problem.time[n]
                yield from further(at)
                del end[n]
                idle_from[rank] = was
                memory[rank] -= problem.added[n]
                work[rank] += problem.time[n]

    return further(0.0)


@pytest.mark.parametrize("number", range(24))
def test_no_order_is_below_the_bound(number: int) -> None:
    problem = drawn(number)
    assert next(orders_below(problem, problem.lower_bound() * (1 - 1e-9)), None) is None
