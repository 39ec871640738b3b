"""Large schedules stay cheap. CPU time, best of three: other processes on the machine must not decide."""

import time

import pytest

from zbcompile.schedules import build, check, lower, simulate


def cpu_seconds(microbatches: int) -> float:
    """Generate, lower, check and simulate zb-v on 64 ranks."""
    start = time.process_time()
    schedule = build("zb-v", ranks=64, microbatches=microbatches)
    check(lower(schedule))
    assert simulate(schedule).makespan == 6 * microbatches + 63
    return time.process_time() - start


@pytest.mark.slow
def test_zb_v_on_64_ranks_takes_seconds_and_grows_linearly() -> None:
    quarter = min(cpu_seconds(128) for _ in range(3))
    whole = min(cpu_seconds(512) for _ in range(3))
    assert whole < 3
    assert whole < 4 * quarter * 1.5  # 1.5: larger data leaves the caches of the processor
