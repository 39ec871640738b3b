"""The writing side of a pipeline's checkpoints."""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.faults.fault_report import Position
from zbcompile.persistence.saved_values import first_cause

LOOK = 0.05  # seconds between two looks at the thread of a save


class FolderWriter:
    """What a pipeline keeps for the checkpoints that it writes: a save that is under way, and the group in which
    processes meet for it while they train."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._pending: tuple[Path, Future[Any], bool] | None = None
        self._works = False

    def group_of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group; the first call makes it, together with all ranks. None in one process."""
        if self.group is None and ranks.everyone is not None:
            with ranks.watch.position.waiting("the making of a group"):
                self.group = ranks.apart()
        return self.group

    def start(self, partial: Path, pending: Any, is_first: bool) -> None:
        """Remember a save that is under way. If it fails the first process removes what it has written."""
        self._pending = partial, pending, is_first

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what the thread of a save does alone, for as long as it takes."""
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def finish(self, position: Position | None = None) -> None:
        """Wait for the save that is under way. Raises PipelineError if it failed, and removes what it has written.
        While the thread waits for other ranks, so does this one at its `position`, if it is given."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        partial, future, is_first = pending
        while position is not None and not future.done():
            if self._works:
                wait((future,), LOOK)
                continue
            with position.waiting("the checkpoint of all ranks"):
                while not (self._works or future.done()):
                    wait((future,), LOOK)
        error = future.exception()
        if error is not None:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise PipelineError(f"{partial} was not finished: {first_cause(error)}") from error

    def close(self) -> None:
        """Wait for the save that is under way."""
        self.finish()
