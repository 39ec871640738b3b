"""For every name x ranks 1..8 x microbatches 1..24 and random costs: right and consistent."""

import random
from functools import cache

import pytest

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, check, lower, names, simulate


@cache
def sizes(name: str) -> list[Schedule]:
    """A third of all sizes, as far as they are admitted; another third for every name."""
    schedules, generator = [], random.Random(name)
    for ranks in range(1, 9):
        for microbatches in generator.sample(range(1, 25), 8):
            try:
                schedules.append(build(name, ranks, microbatches))
            except ScheduleError as error:
                if "admits" not in str(error):
                    raise
    return schedules


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("name", names())
def test_right_and_consistent(name: str, random_costs) -> None:
    generator = random.Random(name)
    for schedule in sizes(name):
        costs = random_costs(generator, schedule.stages)
        lowered = lower(schedule, costs)
        check(lowered, costs)
        t = simulate(schedule, costs)
        assert t.work <= t.cost <= t.makespan
        assert 0 <= t.cost_bubble <= t.bubble < 1
        assert simulate(lowered, costs).makespan == t.makespan
        assert t.makespan >= _critical_path(schedule, costs)


def _critical_path(schedule: Schedule, costs: Costs) -> float:
    """One microbatch forwards through all stages and back: no schedule is shorter."""
    first = schedule.microbatches - 1
    ranks = [schedule.rank_of(stage, first) for stage in range(schedule.stages)]
    hops = sum(costs.hop(s, ranks[s], ranks[s + 1]) for s in range(schedule.stages - 1))
    return sum(costs.forward) + sum(costs.backward) + 2 * hops
