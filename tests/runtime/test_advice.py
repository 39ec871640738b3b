"""Advice is simulation: causes of idle time add up to the bubble, alternatives are what they are said to be."""

from dataclasses import replace

import pytest

from zbcompile.advice import alternatives, format_idle, idle_by_cause
from zbcompile.schedules import Costs, build, simulate
from zbcompile.schedules.timeline import Timeline


def _timeline(name: str, ranks: int, microbatches: int, residue: float = 1) -> Timeline:
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, Costs.uniform(schedule.stages, residue=residue))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_the_causes_account_for_all_idle_time(name: str) -> None:
    timeline = _timeline(name, 4, 8)
    idle = 1 - sum(timeline.busy) / (4 * timeline.makespan)
    assert sum(idle_by_cause(timeline).values()) == pytest.approx(idle, abs=1e-12)


def test_gpipe_is_told_of_a_leaner_and_a_faster_schedule() -> None:
    found = {a.change: a for a in alternatives(_timeline("gpipe", 2, 4))}
    assert set(found) == {"8 microbatches of the same size", "zb-h1"}
    assert found["zb-h1"].time_ratio == pytest.approx(13 / 15)
    assert found["zb-h1"].peak_ratio == 0.5


def test_alternatives_keep_the_stages() -> None:
    for name in ("zb-v", "interleaved-1f1b"):
        timeline = _timeline(name, 4, 8)
        for alternative in alternatives(timeline):
            if "microbatches" not in alternative.change:
                assert build(alternative.change, 4, 8).placement == timeline.schedule.placement


def test_one_rank_has_nothing_to_gain() -> None:
    timeline = _timeline("1f1b", 1, 4)
    assert alternatives(timeline) == ()
    assert format_idle(idle_by_cause(timeline)) == "No rank stands still."


def test_a_schedule_of_ones_own_has_no_name_to_build_again() -> None:
    timeline = _timeline("1f1b", 2, 4)
    own = simulate(replace(timeline.schedule, name="mine"), timeline.costs)
    assert all("microbatches" not in a.change for a in alternatives(own))
