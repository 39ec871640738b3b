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
    generator = random.Random(number)
    placement = generator.choice(("linear", "v", "looped:2"))
    chunks = 1 if placement == "linear" else 2
    several = [tuple(generator.choice((1, 2, 3, 5)) for _ in range(2 * chunks)) for _ in range(5)]
    costs = Costs(
        *several[:3],
        activation=several[3],
        residue=generator.choice((several[4], (0,) * 2 * chunks)),
        comm=1,
    )
    asked = costs, 2, 4 - chunks
    (free,) = scheduling_problems(*asked, None, [placement], True, 1)
    alone = max(peak_memory(free.sequential, costs))
    limit = generator.choice((None, alone, 1.5 * alone, 2 * alone))
    return scheduling_problems(*asked, limit, [placement], generator.random() < 0.5, 1)[0]


def orders_below(problem: SchedulingProblem, value: float) -> Iterator[float]:
    """The objective of every order that is shorter than `value`: begins are tried in order
    of time."""
    limits = problem.limits or (math.inf,) * problem.placement.ranks
    end: dict[int, float] = {}
    held, free = [0.0] * len(limits), [0.0] * len(limits)
    left = [
        sum(t for t, r in zip(problem.time, problem.rank, strict=True) if r == rank)
        for rank in range(len(limits))
    ]

    before = {
        n: problem.number.get(a._replace(microbatch=a.microbatch - 1), -1)
        for n, a in enumerate(problem.actions)
    }
    end[-1] = 0.0  # before the first microbatch

    def begin(n: int) -> float:
        return max(
            [free[problem.rank[n]], *(end[made] + delay for made, delay in problem.inputs[n])]
        )

    def ready() -> list[int]:
        return [
            n
            for n in range(len(problem.actions))
            if n not in end
            and before[n] in end
            and all(made in end for made, _ in problem.inputs[n])
            and held[problem.rank[n]] + problem.added[n] <= limits[problem.rank[n]] * ROUNDING
        ]

    def further(now: float) -> Iterator[float]:
        if any(
            f + rest + o >= value for f, rest, o in zip(free, left, problem.offset, strict=True)
        ):
            return
        if len(end) == len(problem.actions) + 1:
            yield max(map(sum, zip(free, problem.offset, strict=True)))
        for n in ready():
            rank, at = problem.rank[n], begin(n)
            if at >= now:
                before = free[rank]
                end[n] = free[rank] = at + problem.time[n]
                held[rank] += problem.added[n]
                left[rank] -= problem.time[n]
                yield from further(at)
                del end[n]
                free[rank] = before
                held[rank] -= problem.added[n]
                left[rank] += problem.time[n]

    return further(0.0)


@pytest.mark.parametrize("number", range(40))
def test_no_order_is_below_the_bound(number: int) -> None:
    problem = drawn(number)
    assert next(orders_below(problem, problem.lower_bound() * (1 - 1e-9)), None) is None
