"""How long the four steps take, in seconds of one core (CPU time, so that a busy machine does not fail them)."""

from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

from zbcompile.schedules import build, check, lower, simulate


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = process_time()
    result = work()
    return process_time() - start, result


def test_zb_v_on_64_ranks_with_512_microbatches() -> None:
    """Generate, lower, check and simulate 196,608 actions in 3 seconds, generate alone in half a second."""
    attempts = [_four_steps() for _ in range(2)]
    assert min(sum(attempt) for attempt in attempts) < 3
    assert min(attempt[0] for attempt in attempts) < 0.5


def _four_steps() -> tuple[float, ...]:
    generating, schedule = _seconds(lambda: build("zb-v", 64, 512))
    lowering, lowered = _seconds(lambda: lower(schedule))
    checking, _ = _seconds(lambda: check(lowered))
    simulating, _ = _seconds(lambda: simulate(schedule))
    return generating, lowering, checking, simulating


@pytest.mark.slow
def test_zb_h1_on_1024_ranks_with_2048_microbatches() -> None:
    """6,291,456 actions: each of the four steps within a minute, in 3 GB."""
    generating, schedule = _seconds(lambda: build("zb-h1", 1024, 2048))
    simulating, timeline = _seconds(lambda: simulate(schedule))
    assert timeline.makespan == 3 * 2048 + 1023
    del timeline
    lowering, lowered = _seconds(lambda: lower(schedule))
    checking, _ = _seconds(lambda: check(lowered))
    assert max(generating, simulating, lowering, checking) < 60


def test_generation_grows_linearly() -> None:
    small, large = build("zb-h1", 64, 256), build("zb-h1", 64, 1024)
    assert sum(map(len, large.orders)) == 4 * sum(map(len, small.orders))
    fast = min(_seconds(lambda: build("zb-h1", 64, 256))[0] for _ in range(3))
    slow = min(_seconds(lambda: build("zb-h1", 64, 1024))[0] for _ in range(3))
    assert slow < 8 * fast
