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
    counts = costs, 2, 4 - chunks
    (idle_from,) = scheduling_problems(*counts, None, [placement], True, 1)
    sequential_peak = max(peak_memory(idle_from.sequential, costs))
    limit = generator.choice((None, sequential_peak, 1.5 * sequential_peak, 2 * sequential_peak))
    return scheduling_problems(*counts, limit, [placement], generator.random() < 0.5, 1)[0]


def orders_below(problem: SchedulingProblem, value: float) -> Iterator[float]:
    """The objective of every order that is shorter than `value`: begins are tried in order
    of time."""
    limits = problem.limits or (math.inf,) * problem.placement.ranks
    end: dict[int, float] = {}
    memory, idle_from = [0.0] * len(limits), [0.0] * len(limits)
    work = [
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
            [
                idle_from[problem.rank[n]],
                *(end[producer] + delay for producer, delay in problem.inputs[n]),
            ]
        )

    def ready() -> list[int]:
        return [
            n
            for n in range(len(problem.actions))
            if n not in end
            and before[n] in end
            and all(producer in end for producer, _ in problem.inputs[n])
            and memory[problem.rank[n]] + problem.added[n] <= limits[problem.rank[n]] * ROUNDING
        ]

    def further(now: float) -> Iterator[float]:
        if any(
            f + rest + o >= value
            for f, rest, o in zip(idle_from, work, problem.offset, strict=True)
        ):
            return
        if len(end) == len(problem.actions) + 1:
            yield max(map(sum, zip(idle_from, problem.offset, strict=True)))
        for n in ready():
            rank, at = problem.rank[n], begin(n)
            if at >= now:
                before = idle_from[rank]
                end[n] = idle_from[rank] = at + problem.time[n]
                memory[rank] += problem.added[n]
                work[rank] -= problem.time[n]
                yield from further(at)
                del end[n]
                idle_from[rank] = before
                memory[rank] -= problem.added[n]
                work[rank] += problem.time[n]

    return further(0.0)


@pytest.mark.parametrize("number", range(40))
def test_no_order_is_below_the_bound(number: int) -> None:
    problem = drawn(number)
    assert next(orders_below(problem, problem.lower_bound() * (1 - 1e-9)), None) is None
