"""Searches of costs that nobody measures: no time, the largest and smallest floats, what is no
number, and memory that is just enough. `python -m tests.support.hostile_costs --count 1000` tries
more of them than the suite.
"""

import argparse
import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

from zbcompile.schedules import Costs, ScheduleError, bound, build, check, lower, search, simulate
from zbcompile.schedules.searching.order_search import scheduling_problems

EQUAL = 1 + 1e-9
USUAL = (0, 1, 2.5, Fraction(1, 3), 10**20)
STRANGE = (
    1e-300,
    5e-324,
    1e300,
    1e308,
    0.0,
    -0.0,
    10**400,
    math.nan,
    math.inf,
    -1,
    None,
    "2",
    True,
)
FIELDS = ("forward", "backward", "weight", "activation", "residue", "optimizer")


def question(number: int) -> dict[str, Any]:
    """The arguments of a search; costs are those of `Costs`, so that these may be refused, too."""
    rng = random.Random(f"hostile {number}")
    placement = rng.choice(("linear", "linear", "v", "looped:2"))
    ranks = rng.randint(1, 4)
    stages = ranks * (1 if placement == "linear" else 2)
    some = rng.choice(
        (USUAL, (1, 2, 3), (0, 1e-300, 1e300), (1, 1e308), (1, 1e-300), (*USUAL, *STRANGE), (0,))
    )
    costs: dict[str, Any] = {
        name: tuple(rng.choice(some) for _ in range(stages)) for name in FIELDS
    }
    for name in rng.sample(FIELDS, rng.randint(0, 5)):
        costs[name] = tuple(rng.choice((1, 2, 3)) for _ in range(stages))
    costs["comm"] = rng.choice((0, 0, 0.5, rng.choice(some)))
    return {
        "costs": costs,
        "ranks": ranks,
        "microbatches": rng.randint(1, 6),
        "limit": rng.choice(("none", "least", "less", "more", "strange")),
        "strange": rng.choice(STRANGE),
        "placements": [placement],
        "barrier": rng.random() < 0.5,
        "passes": rng.choice((0, 16)),
    }


def outcome(number: int) -> str:
    """Whether a search is refused, or finds what is right; raises AssertionError for what
    is wrong."""
    asked = question(number)
    limit, strange = asked.pop("limit"), asked.pop("strange")
    try:
        costs = Costs(**asked.pop("costs"))
        task = costs, asked["ranks"], asked["microbatches"]
        (problem,) = scheduling_problems(*task, None, asked["placements"], asked["barrier"], 1)
        alone = simulate(problem.sequential, costs).peak_memory
        sizes = {"none": None, "least": alone, "less": [each * (1 - 1e-3) for each in alone]}
        memory = sizes.get(limit, strange if limit == "strange" else [2 * each for each in alone])
        found = search(
            *task, memory, **{name: asked[name] for name in ("placements", "barrier", "passes")}
        )
    except ScheduleError as error:
        return (
            "refused, though it fits"
            if limit == "least" and "no order fits" in str(error)
            else "refused"
        )
    assert limit != "less" or not any(alone), "less than one microbatch needs was enough"
    check(lower(found.schedule), costs)
    step = simulate(found.schedule, costs)
    limits = (
        memory
        if isinstance(memory, (list, tuple))
        else [math.inf if memory is None else memory] * task[1]
    )
    assert all(a <= b * EQUAL for a, b in zip(step.peak_memory, limits, strict=True)), (
        "more memory than the limit"
    )
    assert found.objective == (step.makespan if asked["barrier"] else step.cost), (
        "another objective than simulated"
    )
    assert 0 <= found.bound <= found.objective * EQUAL < math.inf, "the bound is above the order"
    alike = bound(*task, asked["placements"][0], memory, asked["barrier"])
    assert alike <= found.objective * EQUAL, "the bound alone is above the order"
    assert str(found)
    assert memory is not None or found.objective <= _one_name(asked, costs) * EQUAL, (
        "a name is shorter"
    )
    return "proven" if found.proven else "found"


def _one_name(asked: dict[str, Any], costs: Costs) -> float:
    name = {"linear": "1f1b", "v": "zb-v", "looped:2": "interleaved-1f1b"}[asked["placements"][0]]
    try:
        step = simulate(build(name, asked["ranks"], asked["microbatches"], costs), costs)
    except ScheduleError:
        return math.inf
    return float(step.makespan if asked["barrier"] else step.cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    found: Counter[str] = Counter()
    for number in range(options.first, options.first + options.count):
        try:
            found[outcome(number)] += 1
        except Exception as error:  # that is what is looked for
            found["wrong"] += 1
            print(f"{number}: {type(error).__name__}: {error!s:.300}")
    print(*(f"{count} {name}" for name, count in found.items()), sep=", ")


if __name__ == "__main__":
    main()
