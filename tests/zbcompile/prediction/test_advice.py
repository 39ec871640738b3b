"""Advice is simulation: causes of idle time add up to the bubble, alternatives are what they are said to be."""

from dataclasses import replace

import pytest

from zbcompile.prediction.advice import alternatives, format_idle, idle_by_cause, what_if, what_limits
from zbcompile.schedules import Costs, build, simulate
from zbcompile.schedules.simulation.timeline import Timeline


def _timeline(name: str, ranks: int, microbatches: int, residue: float = 1) -> Timeline:
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, Costs.uniform(schedule.stages, residue=residue))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_the_causes_account_for_all_idle_time(name: str) -> None:
    timeline = _timeline(name, 4, 8)
    idle = 1 - sum(timeline.busy) / (4 * timeline.makespan)
    assert sum(idle_by_cause(timeline).values()) == pytest.approx(idle, abs=1e-12)


def test_gpipe_is_told_of_a_leaner_and_a_faster_schedule() -> None:
    found = {a.option: a for a in alternatives(_timeline("gpipe", 2, 4)) if a.worth}
    assert set(found) == {"--microbatches 8", "--schedule zb-h1"}
    assert found["--schedule zb-h1"].time_ratio == pytest.approx(13 / 15)
    assert found["--schedule zb-h1"].peak_ratio == 0.5


def test_alternatives_keep_the_stages() -> None:
    for name in ("zb-v", "interleaved-1f1b"):
        timeline = _timeline(name, 4, 8)
        for alternative in alternatives(timeline):
            if "--schedule" in alternative.option:
                assert build(alternative.option.split()[1], 4, 8).placement == timeline.schedule.placement


def test_the_present_peak_is_asked_for_once() -> None:
    timeline, asked = _timeline("zb-v", 4, 8), list[Timeline]()
    alternatives(timeline, lambda each: asked.append(each) or max(each.peak_memory))  # type: ignore[func-returns-value]
    assert sum(each is timeline for each in asked) == 1 < len(asked)


def test_one_rank_has_nothing_to_gain() -> None:
    timeline = _timeline("1f1b", 1, 4)
    assert not any(a.worth for a in alternatives(timeline))
    assert format_idle(idle_by_cause(timeline)) == "No rank is idle."


def test_a_schedule_of_ones_own_has_no_name_to_build_again() -> None:
    timeline = _timeline("1f1b", 2, 4)
    own = simulate(replace(timeline.schedule, name="mine"), timeline.costs)
    assert all("--microbatches" not in a.option for a in alternatives(own))


def test_what_limits_a_pipeline_is_told_apart() -> None:
    filling = what_limits(_timeline("gpipe", 4, 4))
    assert "filling and draining it: twice the microbatches would save 21.4%" in filling
    schedule = build("1f1b", 2, 64)
    uneven = simulate(schedule, Costs((1, 3), (1, 3), (1, 3)))
    assert "its balance: rank 1 has 1.50 times the mean work" in what_limits(uneven)
    slow = simulate(schedule, Costs.uniform(2, comm=20))
    assert "limits this pipeline are its messages" in what_limits(slow)
    assert "Little limits this pipeline" in what_limits(_timeline("1f1b", 1, 4))
    order = simulate(build("v-half", 2, 16), Costs((3, 2, 2, 2), (2, 2, 3, 1), (3, 1, 2, 1)))
    assert "twice the microbatches would each save less than 2%" in what_limits(order)


def test_the_verdict_is_decided_by_simulation() -> None:
    """Ranks stand still while the pipeline fills and drains, and because every message takes long."""
    timeline = simulate(build("1f1b", 4, 16), Costs.uniform(4, comm=1))
    first, *_ = what_if(timeline)
    free = simulate(timeline.schedule, Costs.uniform(4))
    assert (first.cause, first.gain) == ("messages", pytest.approx(1 - free.makespan / timeline.makespan))


def test_schedules_that_nothing_beats_in_time_and_memory_are_named() -> None:
    timeline = _timeline("gpipe", 4, 8)
    found = [a for a in alternatives(timeline) if "--schedule" in a.option]
    times, peaks = [a.time_ratio for a in found], [a.peak_ratio for a in found]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    everything = (simulate(build(n, 4, 8), timeline.costs) for n in ("1f1b", "zb-h1", "zb-h2"))
    for then in everything:
        time, peak = then.makespan / timeline.makespan, max(then.peak_memory) / max(timeline.peak_memory)
        assert any(t <= time + 1e-9 and p <= peak * 1.001 for t, p in zip(times, peaks, strict=True))
