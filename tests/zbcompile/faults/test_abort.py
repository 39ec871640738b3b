"""Connections are cut on one rank, whatever has become of the others."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool
from zbcompile.faults.watch import abort_group


def wait_and_cut() -> bool:
    """Rank 0 waits for rank 2, which is silent, and is cut while its connection to rank 1 is
    already closed."""
    world = dist.group.WORLD
    assert world is not None
    dist.barrier()
    if dist.get_rank() == 1:
        abort_group(world, "gloo")
    if dist.get_rank() != 0:
        time.sleep(2)
        return True
    raised = threading.Event()
    threading.Thread(target=_wait_for, args=(2, raised), daemon=True).start()
    time.sleep(0.5)
    abort_group(world, "gloo")
    return raised.wait(30)


def _wait_for(rank: int, raised: threading.Event) -> None:
    try:
        dist.recv(torch.empty(1), rank)
    except RuntimeError:
        raised.set()


@pytest.mark.slow
def test_a_wait_ends_though_another_peer_has_gone(pool: Pool) -> None:
    results = pool.run(wait_and_cut, ranks=3)
    pool.group = None  # its connections are closed
    assert results == [True] * 3
