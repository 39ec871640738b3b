"""Every closed form equals the simulator."""

import random
from fractions import Fraction

import pytest

from zbcompile.schedules import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    closed_form,
    names,
    simulate,
)
from zbcompile.schedules.simulation.closed_forms import symbol_values

AUTOMATIC = ("zb-1p", "zb-2p")


def draw_schedule(name: str, generator: random.Random, assumes: str) -> Schedule:
    """Returns a schedule of whole groups, at least two of them, on a number of ranks that the
    formula assumes."""
    ranks = [1, 2, 3, 4, 6, 7, 8] if "p >= 2" not in assumes else [2, 3, 4, 6, 7, 8]
    ranks = [4, 7, 10] if "p = 4" in assumes else [3, 4, 6, 7, 8] if "p >= 3" in assumes else ranks
    while True:
        p = generator.choice(ranks)
        chunks = generator.randint(2, 4) if name.startswith(("interleaved", "looped")) else None
        try:
            return build(name, p, p * generator.randint(2, 5), chunks=chunks)
        except ScheduleError:
            continue


def draw_costs(stages: int, generator: random.Random, assumes: str) -> Costs:
    """Returns equal stages inside the conditions of the formulas; fractions stay exact."""
    weight, forward, backward = sorted(generator.randint(1, 30) for _ in range(3))
    if "T_F = T_B = T_W" in assumes:
        forward = backward = weight
    elif "T_F = T_B" in assumes:
        backward = forward
    comm = (
        0
        if "c = 0" in assumes
        else generator.choice((0, Fraction(weight, generator.randint(4, 40))))
    )
    return Costs.uniform(stages, forward, backward, weight, comm, 10, generator.randint(0, 10))  # type: ignore[arg-type]


@pytest.mark.mostly_slow(every=15)
@pytest.mark.parametrize("name", [name for name in names() if name not in (*AUTOMATIC, "auto")])
def test_closed_forms_equal_the_simulator(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    for _ in range(20):
        schedule = draw_schedule(name, generator, form.assumes)
        costs = draw_costs(schedule.stages, generator, form.assumes)
        values, step = symbol_values(schedule, costs), simulate(schedule, costs)
        assert form.cost is not None
        assert form.makespan is not None
        lengths = form.cost.subs(values), form.makespan.subs(values), form.peak_memory.subs(values)
        assert lengths == (step.cost, step.makespan, max(step.peak_memory)), (
            schedule.placement,
            costs,
        )


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_schedules_have_a_limit_only(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    assert (form.cost, form.makespan, form.bubble, form.cost_bubble) == (None, None, None, None)
    for _ in range(10):
        schedule = draw_schedule(name, generator, "")
        costs = draw_costs(schedule.stages, generator, "")
        assert max(simulate(schedule, costs).peak_memory) <= form.peak_memory.subs(
            symbol_values(schedule, costs)
        )


def test_bubbles_of_the_literature() -> None:
    """(p-1)/(m+p-1) of 1F1B without hops; the cost bubble of ZB-V is zero."""
    for name, figure, expected in (("1f1b", "bubble", Fraction(3, 11)), ("zb-v", "cost_bubble", 0)):
        expression = getattr(closed_form(name), figure)
        step: Timeline = simulate(build(name, 4, 8))
        assert expression.subs(symbol_values(step.schedule, step.costs)) == expected


def test_a_searched_order_has_none() -> None:
    with pytest.raises(ScheduleError, match="auto has no closed form"):
        closed_form("auto")
