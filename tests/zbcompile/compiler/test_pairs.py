"""Pairs with Ws: legal, in no more memory, in a step that is no longer, and with weight gradients
in their order."""

import random
from dataclasses import replace
from operator import add, le

import pytest

from zbcompile.compiler.paired_schedule import with_pairs
from zbcompile.schedules import Costs, Schedule, build, check, lower, names, simulate
from zbcompile.schedules.ir.actions import Action, Pair, flatten


def exposed(schedule: Schedule, costs: Costs) -> float:
    """Returns how long all ranks together wait for exchanges inside of their passes."""
    actions = [action for order in schedule.orders for action in flatten(order)]
    computing = sum(costs.time(op, stage) - costs.exchange(op, stage) for op, stage, _ in actions)
    return sum(simulate(schedule, costs).busy) - computing


def draw_costs(stages: int, generator: random.Random) -> Costs:
    """Returns costs with exchanges of B, and sometimes of F, which add to their time."""
    forward, backward, weight, forward_exchange, backward_exchange, residue = (
        tuple(generator.randint(low, 20) for _ in range(stages)) for low in (1, 1, 0, 0, 0, 0)
    )
    forward_exchange = tuple(generator.choice((0, 1)) * x for x in forward_exchange)
    exchanges = {"forward_exchange": forward_exchange, "backward_exchange": backward_exchange}
    both = tuple(map(add, forward, forward_exchange)), tuple(map(add, backward, backward_exchange))
    keep = {"activation": (20,) * stages, "residue": residue, "comm": generator.choice((0, 1, 5))}
    return Costs(*both, weight, **exchanges, **keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in names() if name != "auto"])
def test_pairs_do_no_harm(name: str) -> None:
    generator = random.Random(name)
    for ranks, microbatches in ((2, 8), (4, 8)):
        schedule = build(name, ranks, microbatches)
        costs = draw_costs(schedule.stages, generator)
        paired = with_pairs(schedule, costs)
        check(lower(paired, costs))
        before, after = simulate(schedule, costs), simulate(paired, costs)
        assert after.makespan <= before.makespan
        assert after.cost <= before.cost
        assert all(map(le, after.peak_memory, before.peak_memory))
        assert exposed(paired, costs) <= exposed(schedule, costs)
        for stage in range(schedule.stages):
            assert paired.weight_order(stage) == schedule.weight_order(stage)


def test_most_is_hidden() -> None:
    """Exchanges of half a W, on two ranks: the step is nearly as long as if they took no time."""
    schedule = build("zb-v", ranks=2, microbatches=8)
    every = (1,) * schedule.stages
    exchange = (0.5,) * schedule.stages
    costs = Costs(every, (1.5,) * schedule.stages, every, backward_exchange=exchange)
    paired = with_pairs(schedule, costs)
    assert 1 - exposed(paired, costs) / (0.5 * 8 * schedule.stages) >= 0.9
    free = simulate(schedule, Costs.uniform(schedule.stages)).makespan
    assert simulate(paired, costs).makespan <= free + 2.5


def of_one_rank(*steps: Action | Pair) -> Schedule:
    return replace(build("zb-h1", ranks=1, microbatches=2), orders=(steps,))


F0, B0, W0, F1, B1, W1 = (Action(op, 0, m) for m in (0, 1) for op in "FBW")


def test_a_pair_is_legal_where_its_parts_are() -> None:
    """A backward and its products are fused."""
    for schedule in (
        of_one_rank(F0, Pair(B0, W0), F1, B1, W1),
        of_one_rank(F0, B0, F1, Pair(B1, W0), W1),
        of_one_rank(F0, B0, Pair(F1, W0), B1, W1),
    ):
        check(schedule)
        check(lower(schedule))
        opened = replace(schedule, orders=tuple(tuple(flatten(order)) for order in schedule.orders))
        assert simulate(schedule).makespan == simulate(opened).makespan
    with pytest.raises(Exception, match=r"runs \(B0\.0\|W0\.1\) before B0\.1"):
        check(of_one_rank(F0, F1, Pair(B0, W1), B1, W0))
    (order,) = with_pairs(of_one_rank(F0, Pair(B0, W0), F1, B1, W1), Costs.uniform(1)).orders
    assert order[1] == Action("BW", 0, 0)
