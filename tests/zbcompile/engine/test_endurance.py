"""Nothing grows over many steps, or over pipelines that come and go."""

import gc
import os
import threading
import time
import tracemalloc

import pytest
import torch

from tests.support.live_storages import leave_aside
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of


def census() -> dict[str, int]:
    gc.collect()
    gc.collect()  # values whose weak keys the first one freed
    return {
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        "python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),  # sockets among them
        "bytes": tracemalloc.get_traced_memory()[0],
    }


def settled(before: dict[str, int], name: str) -> dict[str, int]:
    """Returns the census when it is no longer above another one, or after ten seconds."""
    deadline = time.monotonic() + 10
    while (after := census())[name] > before[name] and time.monotonic() < deadline:
        time.sleep(0.05)
    return after


def grown(steps: int) -> dict[str, int]:
    """Returns the growth over `steps` steps."""
    leave_aside()
    pipe, batch = compiled()
    tracemalloc.start()  # what a step replaces must have been counted when it was made
    for _ in range(105):  # a comparison of batches is among them, which comes every 100 steps
        pipe.step(*batch.args, target=batch.target)
    before = census()
    for _ in range(steps):
        pipe.step(*batch.args, target=batch.target)
    after = settled(before, "tensors")  # gloo lets go of what it sent a moment after `wait`
    tracemalloc.stop()
    pipe.close()
    return {name: after[name] - before[name] for name in after}


def compiled():
    pipe = pipeline_of(Case("short-mlp", "1f1b", 2, 2))
    batch = PROBLEMS["short-mlp"].batches(1, 4)[0]
    return pipe.compile(*batch.args, target=batch.target), batch


def left_behind() -> dict[str, int]:
    """Returns the growth over pipelines, made and closed."""
    before: dict[str, int] = {}
    for times in (3, 9):
        for _ in range(times):
            pipeline_of(Case("short-mlp", "1f1b", 2, 2)).close()
        before = before or settled({"python threads": 1}, "python threads")
    after = settled(before, "threads")
    return {name: after[name] - before[name] for name in ("threads", "file descriptors")}


def growth() -> tuple[dict[str, int], dict[str, int]]:
    return grown(20), left_behind()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts threads and files in /proc")
def test_steps_and_pipelines_leave_nothing_behind(pool: Pool) -> None:
    for steps, pipelines in pool.run(growth):
        assert steps.pop("bytes") < 20_000, steps  # tracemalloc's books, caches that fill once
        assert not any(steps.values()), steps
        assert max(pipelines.values()) <= 0, pipelines
