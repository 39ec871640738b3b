"""Every closed form equals the simulator, and every message count the lowered program, inside its conditions."""

# pyright: reportArgumentType=false
# Fractions stand for floats: they stay exact.

import random
from fractions import Fraction

import pytest

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, lower, names, simulate
from zbcompile.schedules.simulation.closed_forms import T_P, closed_form

AUTOMATIC = ("zb-1p", "zb-2p")
COMM_OPS = ("SEND_F", "SEND_B")


def draw_schedule(name: str, generator: random.Random) -> Schedule:
    while True:
        ranks, microbatches = generator.choice((1, 2, 3, 4, 4, 6, 7, 8)), generator.randint(1, 30)
        chunks = generator.randint(2, 4) if name.startswith(("interleaved", "looped")) else None
        if generator.random() < 0.5:
            microbatches = ranks * generator.randint(1, 4)
        try:
            return build(name, ranks, microbatches, chunks=chunks)
        except ScheduleError:
            continue


def draw_costs(stages: int, generator: random.Random) -> Costs:
    """Equal stages; equal times, equal forward and backward, and free or short hops often enough to meet conditions."""
    forward, backward, weight = (generator.randint(1, 30) for _ in range(3))
    if generator.random() < 0.5:
        backward = forward
    if generator.random() < 0.5:
        weight = min(weight, forward)
    if generator.random() < 0.5:
        backward = weight = forward
    comm = generator.choice((0, 0, Fraction(weight, generator.randint(2, 40)), generator.randint(0, 40)))
    residue = generator.randint(0, 10)
    return Costs.uniform(
        stages, forward, backward, weight, comm, 10, residue, overlap=generator.choice((0, 0, Fraction(1, 2), 1))
    )


@pytest.mark.mostly_slow(every=15)
@pytest.mark.parametrize("name", [name for name in names() if name not in (*AUTOMATIC, "auto")])
def test_closed_forms_equal_the_simulator(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    compared = dict.fromkeys(("cost", "makespan", "peak"), 0)
    while min(compared.values()) < 8:
        schedule = draw_schedule(name, generator)
        costs = draw_costs(schedule.stages, generator)
        formulas = {figure: getattr(form, figure) for figure in compared}
        exact = {figure: f.at(schedule, costs) for figure, f in formulas.items() if f.holds(schedule, costs)}
        if exact:
            t = simulate(schedule, costs)
            found = {"cost": t.cost, "makespan": t.makespan, "peak": max(t.peak_memory)}
            for figure, value in exact.items():
                assert value == found[figure], (figure, schedule.placement, schedule.microbatches, costs)
                compared[figure] += 1


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_schedules_have_a_limit_only(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    assert (form.cost, form.makespan, form.bubble) == (None, None, None)
    for _ in range(10):
        schedule = draw_schedule(name, generator)
        costs = draw_costs(schedule.stages, generator)
        assert max(simulate(schedule, costs).peak_memory) <= form.peak.at(schedule, costs)


@pytest.mark.parametrize("name", sorted({*names()} - {"auto"}))
def test_message_counts_equal_the_lowered_program(name: str) -> None:
    form, generator = closed_form(name), random.Random(name)
    for _ in range(5):
        schedule = draw_schedule(name, generator)
        sends = sum(step[0] in COMM_OPS for program in lower(schedule).programs for step in program)
        assert form.messages.at(schedule, Costs.uniform(schedule.stages)) == sends


def test_bubbles_of_the_literature() -> None:
    """(p-1)/(m+p-1) of 1F1B without hops; the cost bubble of ZB-V is zero."""
    f = closed_form("1f1b").bubble
    assert f is not None
    schedule = build("1f1b", 4, 8)
    assert f.at(schedule, Costs.uniform(4)) == Fraction(3, 11)
    g = closed_form("zb-v").cost_bubble
    assert g is not None
    assert g.at(build("zb-v", 4, 8), Costs.uniform(8)) == 0
    h = closed_form("dualpipe-v").bubble
    assert h is not None
    assert T_P not in h.value.free_symbols


def test_outside_its_conditions_a_formula_refuses() -> None:
    form = closed_form("zb-h1")
    schedule = build("zb-h1", 4, 8)
    assert form.cost is not None
    with pytest.raises(ScheduleError, match="this closed form holds for"):
        form.cost.at(schedule, Costs.uniform(4, forward=1, weight=2))
    with pytest.raises(ScheduleError, match="equal stages"):
        form.cost.at(schedule, Costs((1, 2, 1, 1), (1,) * 4, (1,) * 4))
