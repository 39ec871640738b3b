"""Every closed form equals the simulator."""

import random
from fractions import Fraction

import pytest

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, closed_form, names, simulate
from zbcompile.schedules.simulation.closed_forms import symbol_values

AUTOMATIC = ("zb-1p", "zb-2p")


def draw_schedule(name: str, generator: random.Random, assumes: str) -> Schedule:
    """A schedule of whole groups, at least two of them, on ranks that the formula assumes."""
    ranks = [1, 2, 3, 4, 6, 7, 8] if "p >= 2" not in assumes else [2, 3, 4, 6, 7, 8]
    ranks = [4, 7, 10] if "p = 4" in assumes else [3, 4, 6, 7, 8] if "p >= 3" in assumes else ranks
    while True:
        p = generator.choice(ranks)
        chunks = generator.randint(2, 4) if name.startswith(("interleaved", "looped")) else None
        try:
            return build(name, p, p * generator.randint(2, 5), chunks=chunks)
        except ScheduleError:
            continue


def draw_costs(stages: int, any_: random.Random, assumes: str) -> Costs:
    """Equal stages inside the conditions of the formulas; fractions stay exact."""
    weight, forward, backward = sorted(any_.randint(1, 30) for _ in range(3))
    if "T_F = T_B = T_W" in assumes:
        forward = backward = weight
    elif "T_F = T_B" in assumes:
        backward = forward
    comm = any_.choice((0, Fraction(weight, any_.randint(4, 40)))) if "c = 0" not in assumes else 0
    return Costs.uniform(stages, forward, backward, weight, comm, 10, any_.randint(0, 10))


@pytest.mark.mostly_slow(every=6, suite=1)
@pytest.mark.parametrize("name", [name for name in names() if name not in (*AUTOMATIC, "auto")])
def test_closed_forms_equal_the_simulator(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    for _ in range(2):
        schedule = draw_schedule(name, generator, form.assumes)
        costs = draw_costs(schedule.stages, generator, form.assumes)
        values, step = symbol_values(schedule, costs), simulate(schedule, costs)
        lengths = (f.subs(values) for f in (form.cost, form.makespan, form.peak_memory))
        expected = step.cost, step.makespan, max(step.peak_memory)
        assert (*lengths,) == expected, (schedule.placement, costs)


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_schedules_have_a_limit_only(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    assert (form.cost, form.makespan, form.bubble, form.cost_bubble) == (None, None, None, None)
    for _ in range(3):
        schedule = draw_schedule(name, generator, "")
        costs = draw_costs(schedule.stages, generator, "")
        limit = form.peak_memory.subs(symbol_values(schedule, costs))
        assert max(simulate(schedule, costs).peak_memory) <= limit
    with pytest.raises(ScheduleError, match="auto has no closed form"):
        closed_form("auto")
