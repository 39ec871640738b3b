"""The critical path, checked by what it means: a path is a proof of a length."""

import itertools
import random

import pytest

from zbcompile.schedules import build, critical_path, lower, names, simulate


@pytest.mark.parametrize("name", names())
def test_a_critical_path_is_as_long_as_the_step(name: str, random_costs) -> None:
    generator = random.Random(7)
    for ranks, microbatches in ((2, 4), (4, 8)):
        schedule = build(name, ranks, microbatches)
        costs = random_costs(generator, schedule.stages)
        for program in (schedule, lower(schedule)):
            timeline = simulate(program, costs)
            path = critical_path(timeline)
            assert (path[0].start, path[-1].end) == (0, timeline.finish)
            for step, following in itertools.pairwise(path):
                assert following.start == pytest.approx(step.end + step.travel)
                # there a SEND may have waited for the very rank it sends to
                assert program.is_lowered or not step.travel or step.rank != following.rank
            length = sum(step.end - step.start + step.travel + step.overhead for step in path)
            assert length == pytest.approx(timeline.finish)
