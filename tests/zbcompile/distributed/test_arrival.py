"""A process that is asked to end while it looks for the others says who is missing."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ports import free_port
from zbcompile.distributed.arrival import Rendezvous
from zbcompile.errors import PipelineError

pytestmark = pytest.mark.waits


def gather(arrival: Rendezvous) -> None:
    with contextlib.suppress(PipelineError):
        arrival.join("gloo")


def wait_inside_torch(arrival: Rendezvous) -> None:
    """Where Python's handlers of signals do not run."""
    arrival.absent = "rank 0 did not arrive"
    with arrival._watched(), contextlib.suppress(RuntimeError):
        dist.HashStore().wait(["never"])


def come(port: int, launcher: bool, said: Path, wait: Callable[[Rendezvous], None]) -> None:
    sys.stderr = said.open("w")
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    wait(Rendezvous(place | {"TORCHELASTIC_USE_AGENT_STORE": str(launcher)}, 60.0))


@pytest.mark.parametrize("wait", [gather, wait_inside_torch])
@pytest.mark.parametrize("launcher", [True, False])
def test_who_is_missing_is_said_at_the_end(launcher: bool, wait: Callable[[Rendezvous], None], tmp_path: Path) -> None:
    port, said = free_port(), tmp_path / "said"
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if launcher else None
    process = multiprocessing.get_context("fork").Process(target=come, args=(port, launcher, said, wait))
    process.start()
    assert process.pid is not None
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGTERM)
    end = time.monotonic() + 30
    while "SIGTERM" not in (said.read_text() if said.exists() else "") and time.monotonic() < end:
        time.sleep(0.05)
    if wait is wait_inside_torch:
        process.kill()
    process.join(30)
    assert process.exitcode == (-signal.SIGKILL if wait is wait_inside_torch else -signal.SIGTERM)
    text = said.read_text()
    assert text.count("rank 1 of 2 found no process group") == 1
    assert "rank 0 did not arrive" in text or "rank 0, which keeps the store at 127.0.0.1" in text
    assert "it was terminated (SIGTERM)" in text
    del store
