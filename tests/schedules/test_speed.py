"""Large schedules stay cheap: the CPU time of the four steps grows linearly.

Seconds are measured by `examples/benchmarks/schedules_scale.py`; a test compares two sizes.
"""

from time import process_time

import pytest

from zbcompile.schedules import build, check, lower, simulate


def _seconds(microbatches: int) -> float:
    """Generates, lowers, checks and simulates zb-v on 16 ranks."""
    start = process_time()
    schedule = build("zb-v", ranks=16, microbatches=microbatches)
    check(lower(schedule))
    assert simulate(schedule).makespan == 6 * microbatches + 15
    return process_time() - start


@pytest.mark.slow
def test_four_steps_grow_linearly() -> None:
    """Eight times the microbatches take no more than sixteen times as long; quadratic growth would
    take 64 times."""
    small, large = (min(_seconds(count) for _ in range(2)) for count in (64, 512))
    assert large < 16 * small
