"""The closed form beside a predicted bubble."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from zbcompile.inspection.closed_form import with_equal_stages
from zbcompile.schedules import Costs, Link, build, names, simulate
from zbcompile.schedules.ir.schedule import Way


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("name", names())
def test_it_is_the_bubble_of_equal_stages(name: str) -> None:
    """Whatever the stages cost: the same work spread evenly, simulated, has the bubble that the formula gives."""
    generator, found = random.Random(name), 0
    schedule = build(name, 4, 8)
    for _ in range(20):
        forward = [generator.uniform(1, 2) for _ in range(schedule.stages)]
        weight = [time * generator.choice((0.5, 1)) for time in forward]
        costs = Costs(tuple(forward), tuple(forward), tuple(generator.choice((forward, weight))))
        found_here = with_equal_stages(simulate(schedule, costs))
        if found_here is not None:
            found += 1
            means = (Fraction(sum(map(Fraction, times))) / schedule.stages for times in (costs.forward, costs.weight))
            f, w = map(float, means)
            even = simulate(schedule, Costs.uniform(schedule.stages, f, f, w))
            assert found_here.bubble == pytest.approx(even.bubble, abs=1e-9)
    assert bool(found) == (name not in ("zb-1p", "zb-2p", "auto")) or name == "v-min"  # which asks for p mod 3 = 1


def test_none_for_another_order_of_the_same_name_and_for_unequal_links() -> None:
    schedule = build("1f1b", 4, 8)
    other = replace(build("gpipe", 4, 8), name="1f1b")
    assert with_equal_stages(simulate(other)) is None
    assert with_equal_stages(simulate(replace(schedule, name="mine"))) is None
    straight = replace(schedule, ways=(Way(0, 2, True),))
    assert with_equal_stages(simulate(straight)) == with_equal_stages(simulate(schedule)) is not None
    linked = replace(Costs.uniform(4), links=(Link(0, 1, 0.5),))
    assert with_equal_stages(simulate(schedule, linked)) is None
    assert with_equal_stages(simulate(schedule, Costs.uniform(4, optimizer=1))) is None
