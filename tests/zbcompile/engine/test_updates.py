"""The optimizer's actions in an order: where they are, and what they cost."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from zbcompile.program.updates import with_updates
from zbcompile.schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    build,
    check,
    critical_path,
    lower,
    simulate,
    to_svg,
)
from zbcompile.schedules.ir.actions import OPT, REDUCE, flatten

UPDATES = (REDUCE, OPT)
SUBSETS = [kinds for size in range(1, 3) for kinds in combinations(UPDATES, size)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_updates_are_in_their_place_and_their_times_add_up(name: str) -> None:
    generator = random.Random(name)
    for _ in range(4):
        plain = build(name, ranks=generator.randint(1, 4), microbatches=8)
        kinds = generator.choice(SUBSETS)
        optimizer = tuple(generator.randint(0, 9) for _ in range(plain.stages))
        costs = replace(Costs.uniform(plain.stages), optimizer=optimizer)
        schedule, program = with_updates(plain, kinds), with_updates(lower(plain), kinds)
        assert schedule == program.compute_only()
        for step in (schedule, program, lower(schedule)):
            assert_in_place(step, kinds)
            t = simulate(step, costs)
            assert sum(i.end - i.start for i in t.idle) + sum(t.busy) == t.finish * t.schedule.ranks
            path = critical_path(t)
            assert sum(s.end - s.start + s.travel + s.overhead for s in path) == t.finish
            if OPT in kinds:
                assert (t.makespan, t.optimizer) == (t.finish, (0,) * t.schedule.ranks)


def assert_in_place(schedule: Schedule, kinds: tuple[str, ...]) -> None:
    """No update precedes a gradient."""
    for rank, order in enumerate(schedule.orders):
        actions = [*flatten(order)]
        for stage in schedule.placement.stages_of(rank):
            ops = [op for op, at, _ in actions if at == stage]
            assert [op for op in ops if op in UPDATES] == [op for op in UPDATES if op in kinds]
            for place, op in enumerate(ops):
                if op in (REDUCE, OPT):
                    assert not {"W", "BW"} & {*ops[place:]}
                elif op in UPDATES:
                    assert not {"F", "B", "BW"} & {*ops[:place]}


def test_an_update_takes_the_time_of_the_optimizer_and_has_a_look() -> None:
    plain = build("zb-h1", ranks=2, microbatches=2)
    t = simulate(with_updates(plain, UPDATES), replace(Costs.uniform(2), optimizer=(1, 1)))
    assert t.makespan == simulate(plain).makespan + 1
    assert f'fill="url(#{OPT})"' in to_svg(t)


def test_a_schedule_to_check_has_no_updates_and_two_model_copies_update_at_the_end() -> None:
    """The engine adds them: a file that has one would update a stage a second time."""
    schedule = build("zb-h1", ranks=2, microbatches=2)
    orders = ((*schedule.orders[0], Action(OPT, 0, 0)), schedule.orders[1])
    with pytest.raises(ScheduleError, match=r"OPT0.0 appears a second time, .* nothing needs it"):
        check(replace(schedule, orders=orders))
    plain = build("dualpipe", ranks=4, microbatches=8)
    assert with_updates(plain, UPDATES) == plain
