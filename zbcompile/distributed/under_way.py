"""Exchanges under way. A process does not end while one of its last step is: a thread of gloo holds
the tensors of an exchange until it is over, and needs the GIL to release them. If the interpreter
has already exited by then, the process ends with SIGABRT after a training run in which nothing
failed."""

import atexit
import contextlib
import sys
import time
from datetime import timedelta

import torch.distributed as dist

_under_way: list[dist.Work] = []
PATIENCE = timedelta(seconds=10)
LETTING_GO = 0.01  # seconds in which gloo's threads, done with an exchange, get Python's lock


def outlives_its_step(work: dist.Work) -> dist.Work:
    """Registers an exchange, just begun, that may stay in flight until the process ends."""
    _under_way[:] = [pending for pending in _under_way if not pending.is_completed()]
    _under_way.append(work)
    return work


def complete(work: dist.Work) -> None:
    """Wait for it; its tensors need not be kept any more."""
    work.wait()
    _under_way[:] = [pending for pending in _under_way if pending is not work]


@atexit.register
def _wait_for_all() -> None:
    if not _under_way:
        return
    while _under_way and not hasattr(
        sys, "last_value"
    ):  # after an error others may never take part
        with contextlib.suppress(RuntimeError):
            _under_way.pop().wait(PATIENCE)
    time.sleep(LETTING_GO)
