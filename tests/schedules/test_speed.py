"""Large schedules stay cheap: the time of the four steps grows linearly.

Seconds are measured by `examples/benchmarks/schedules_scale.py`; a test compares two sizes in one
run. CPU time in processes of their own, so that neither a busy machine nor the garbage of other
tests decides.
"""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from time import process_time
from zbcompile.schedules import build, check, lower, simulate

start = process_time()
schedule = build("zb-v", ranks=32, microbatches=int(sys.argv[1]))
check(lower(schedule))
makespan = simulate(schedule).makespan
print(json.dumps({"makespan": makespan, "seconds": process_time() - start}))
"""


def _seconds(microbatches: int) -> float:
    """Generate, lower, check and simulate zb-v on 32 ranks."""
    command = [sys.executable, "-c", PROGRAM, str(microbatches)]
    measured = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    )
    assert measured["makespan"] == 6 * microbatches + 31
    return measured["seconds"]


@pytest.mark.slow
def test_four_steps_grow_linearly() -> None:
    """Four times the microbatches take no more than eight times as long; quadratic growth would
    take sixteen times."""
    # in turns
    small, large = map(min, zip(*((_seconds(128), _seconds(512)) for _ in range(2)), strict=True))
    assert large < 8 * small
