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

_in_flight: list[dist.Work] = []
PATIENCE = timedelta(seconds=10)
LETTING_GO = 0.01  # seconds in which gloo's threads, done with an exchange, get Python's lock


def keep_in_flight(work: dist.Work) -> dist.Work:
    """Registers an exchange, just begun, that may stay in flight until the process ends."""
    _in_flight[:] = [pending for pending in _in_flight if not pending.is_completed()]
    _in_flight.append(work)
    return work


def complete(work: dist.Work) -> None:
    """Wait for it; its tensors need not be kept any more."""
    work.wait()
    _in_flight[:] = [pending for pending in _in_flight if pending is not work]


@atexit.register
def _wait_for_all() -> None:
    if not _in_flight:
        return
    while _in_flight and not hasattr(
        sys, "last_value"
    ):  # after an error others may never take part
        with contextlib.suppress(RuntimeError):
            _in_flight.pop().wait(PATIENCE)
    time.sleep(LETTING_GO)
