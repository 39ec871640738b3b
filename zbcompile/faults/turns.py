"""Threads take turns, because a pipeline works with state of the whole process.

Torch draws the random numbers of all threads from one generator per device, and a capture replaces parts of torch while
it runs. So one pipeline at a time compiles, steps or evaluates.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zbcompile.errors import PipelineError

_PROCESS = threading.RLock()


@dataclass
class Turns:
    """The calls of one pipeline. Other pipelines of the process wait for their turn if `wait`; else they are refused:
    processes could deadlock on each other's turns. A second thread in this pipeline is always refused."""

    wait: bool
    _here: Any = field(default_factory=threading.RLock)

    @contextmanager
    def take(self, doing: str) -> Iterator[None]:
        """Around one call. Raises PipelineError for a thread that may not run it now."""
        if not self._here.acquire(blocking=False):
            raise PipelineError(
                f"{doing}: another thread is inside this pipeline. Its calls must not overlap: make them from one "
                "thread, or hold a lock around each."
            )
        try:
            if not _PROCESS.acquire(blocking=self.wait):
                raise PipelineError(
                    f"{doing}: another thread of this process is inside another pipeline, with which this one shares "
                    "the random number generators; waiting for it could block ranks that wait for each other. Call "
                    "both from one thread, in the same order on every rank."
                )
            try:
                yield
            finally:
                _PROCESS.release()
        finally:
            self._here.release()
