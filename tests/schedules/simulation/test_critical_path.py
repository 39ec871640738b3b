"""The critical path, checked by what it means: a path is a proof of a length."""

import itertools
import random

import pytest

from zbcompile.schedules import Timeline, build, critical_path, lower, names, simulate


def _timelines(random_costs) -> list[Timeline]:
    generator = random.Random(7)
    timelines = []
    for name in names():
        for ranks, microbatches in ((1, 3), (2, 4), (4, 8)):
            if name == "dualpipe" and ranks == 1:
                continue
            schedule = build(name, ranks, microbatches + microbatches % 2)
            costs = random_costs(generator, schedule.stages)
            timelines += [simulate(schedule, costs), simulate(lower(schedule), costs)]
    return timelines


def test_a_critical_path_is_as_long_as_the_step(random_costs) -> None:
    for timeline in _timelines(random_costs):
        path = critical_path(timeline)
        assert path[0].start == 0
        assert path[-1].end == timeline.finish
        for step, following in itertools.pairwise(path):
            assert following.start == pytest.approx(step.end + step.travel)
            # there a SEND may have waited for the very rank it sends to
            if not timeline.schedule.is_lowered:
                assert step.travel == 0 or step.rank != following.rank
        length = sum(step.end - step.start + step.travel + step.overhead for step in path)
        assert length == pytest.approx(timeline.finish)


def test_shortening_what_is_on_the_path_shortens_the_step(random_costs) -> None:
    """Nothing else does: a stage's pass that the path never takes may become 1% faster without
    any gain."""
    generator = random.Random(8)
    schedule = build("zb-h1", 4, 8)
    costs = random_costs(generator, 4)
    before = simulate(schedule, costs)
    on_path = {(a.op, a.stage) for step in critical_path(before) for a in [step.step]}
    assert on_path
    for op, times in (("F", "forward"), ("B", "backward"), ("W", "weight")):
        for stage in range(4):
            faster = [t * (0.99 if s == stage else 1) for s, t in enumerate(getattr(costs, times))]
            after = simulate(schedule, costs.__class__(**{**vars(costs), times: tuple(faster)}))
            if (op, stage) not in on_path:
                assert after.finish == pytest.approx(before.finish)
