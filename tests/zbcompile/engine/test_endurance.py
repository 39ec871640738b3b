"""Nothing grows over many steps."""

import gc
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from tests.support.live_storages import leave_aside
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import Case, pipeline_of


def compiled(case: Case):
    pipe = pipeline_of(case)
    batch = PROBLEMS[case.problem].batches(1, 2 * case.microbatches)[0]
    pipe.compile(*batch.args, target=batch.target)
    return pipe, batch


def grown(case: Case, steps: int) -> dict[str, int]:
    """Returns the growth over `steps` steps."""
    leave_aside()
    pipe, batch = compiled(case)
    tracemalloc.start()  # what a step replaces must have been counted when it was made
    for _ in range(120):  # a comparison of batches is among them, which comes every 100 steps
        pipe.step(*batch.args, target=batch.target)
    before = census()
    for _ in range(steps):
        pipe.step(*batch.args, target=batch.target)
    after = settled_census(before["tensors"])
    tracemalloc.stop()
    return {name: after[name] - before[name] for name in after}


def settled_census(tensors: int) -> dict[str, int]:
    """A census once gloo's own threads let go of what they sent: `wait` returns a moment before
    they do."""
    deadline = time.monotonic() + 10
    while (results := census())["tensors"] > tensors and time.monotonic() < deadline:
        time.sleep(0.05)
    return results


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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts threads and files in /proc")
def test_steps_leave_nothing_behind(pool: Pool) -> None:
    for results in pool.run(grown, Case("short-mlp", "zb-h1", 2, 2), 40):
        assert results.pop("bytes") < 20_000, (
            results
        )  # tracemalloc's own books, and caches that fill once
        assert not any(results.values()), results


def left_behind(close: bool) -> dict[str, int]:
    """Returns the growth over 30 pipelines, some of which ran, were made and closed, or
    dropped."""
    leave_aside()
    _come_and_go(5, close)
    before = _held()
    _come_and_go(30, close)
    return {name: now - before[name] for name, now in _held().items()}


def _come_and_go(times: int, close: bool) -> None:
    for number in range(times):
        pipe = pipeline_of(Case("mlp", "1f1b", 2, 2))
        if number == 0:
            batch = PROBLEMS["mlp"].batches(1, 4)[0]
            pipe.step(*batch.args, target=batch.target)
        if close:
            pipe.close()
        del pipe
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("zbcompile"):
            thread.join(5)


def _held() -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = len(os.listdir("/proc/self/task"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads,
        "megabytes": resident >> 20,
    }


@pytest.mark.slow
@pytest.mark.parametrize("close", [True, pytest.param(False, marks=pytest.mark.beyond_sample)])
def test_pipelines_leave_nothing_behind(close: bool, pool: Pool) -> None:
    for results in pool.run(left_behind, close):
        assert results["descriptors"] <= 0
        assert results["threads"] <= 0
        assert results["megabytes"] <= 4
