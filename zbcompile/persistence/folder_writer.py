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
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.saved_values import first_cause

LOOK = 0.05  # seconds between two looks at the thread of a save


class FolderWriter:
    """What a pipeline keeps for the checkpoints that it writes: the lock of a folder, which the first process has, a
    save that is under way, and the group in which processes meet for it while they train."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.lock: FolderLock | None = None
        self.group: dist.ProcessGroup | None = None
        self._pending: tuple[Path, Future[Any]] | None = None
        self._works = False

    def take(self, folder: Path | None, lock: FolderLock | None) -> None:
        """Keep the lock of `folder` in place of that of another folder."""
        if self.lock is not None:
            self.lock.close()
        self.folder, self.lock = folder, lock

    def group_of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group; the first call makes it, together with all ranks. None in one process."""
        if self.group is None and ranks.everyone is not None:
            with ranks.watch.position.waiting("the making of a group"):
                self.group = ranks.apart()
        return self.group

    def start(self, partial: Path, pending: Any) -> None:
        """Remember a save that is under way."""
        self._pending = partial, pending

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
        partial, future = pending
        while position is not None and not future.done():
            if self._works:
                wait((future,), LOOK)
                continue
            with position.waiting("the checkpoint of all ranks"):
                while not (self._works or future.done()):
                    wait((future,), LOOK)
        error = future.exception()
        if error is not None:
            if self.lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise PipelineError(f"{partial} was not finished: {first_cause(error)}") from error

    def close(self) -> None:
        """Wait for the save that is under way, and give the folder back."""
        try:
            self.finish()
        finally:
            self.take(None, None)
