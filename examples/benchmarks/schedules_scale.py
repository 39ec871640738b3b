"""How long generating, lowering, checking and simulating a schedule takes, in CPU time of one core.

python examples/benchmarks/schedules_scale.py                          # zb-v, 64 ranks, growing
microbatches python examples/benchmarks/schedules_scale.py zb-h1 1024 2048          # one size
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from zbcompile.schedules import Costs, build, check, lower, simulate

DEFAULT = [("zb-v", 64, microbatches) for microbatches in (64, 128, 256, 512)]


def timed(seconds: list[float], step: Callable[[], Any]) -> Any:
    """Run `step` and append the CPU time that it took."""
    start = time.process_time()
    result = step()
    seconds.append(time.process_time() - start)
    return result


def measure(name: str, ranks: int, microbatches: int) -> None:
    """Print one line for one size."""
    seconds: list[float] = []
    schedule = timed(seconds, lambda: build(name, ranks, microbatches))
    costs = Costs.uniform(schedule.stages)
    lowered = timed(seconds, lambda: lower(schedule))
    timed(seconds, lambda: check(lowered))
    makespan = timed(seconds, lambda: simulate(schedule, costs).makespan)
    actions = sum(map(len, schedule.orders))
    steps = "  ".join(
        f"{what} {s:6.2f} s"
        for what, s in zip(("build", "lower", "check", "simulate"), seconds, strict=True)
    )
    rate = sum(seconds) / actions * 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name} {ranks} x {microbatches}: {actions:,} actions  {steps}  all {sum(seconds):6.2f} s",
        flush=True,
    )
    print(f"    {rate:.1f} us per action, {peak:.1f} GiB; makespan {makespan:g}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        for size in DEFAULT:
            measure(*size)
