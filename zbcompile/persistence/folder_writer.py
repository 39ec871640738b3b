"""What a pipeline keeps for the checkpoints that it writes."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.saved_values import first_cause


class FolderWriter:
    """What a pipeline keeps for the checkpoints that it writes: the lock of a folder, which the first process has, a
    save that is under way, and the group in which processes meet for it while they train."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.lock: FolderLock | None = None
        self.group: dist.ProcessGroup | None = None
        self._pending: tuple[Path, Future[Any]] | None = None

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

    def finish(self) -> None:
        """Wait for the save that is under way. Raises PipelineError if it failed, and removes what it has written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        partial, future = pending
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
