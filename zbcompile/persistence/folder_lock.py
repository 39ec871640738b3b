"""The lock of a folder of checkpoints, so that only one run writes into it: a lock of the operating system."""

import contextlib
import os
import socket
import sys
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from zbcompile.errors import PipelineError
from zbcompile.untrusted_text import read_text

NAME = ".writer"
PATIENCE = 6.0  # seconds for a run that is about to end: forked workers of a killed process hold its files so long


class FolderLock:
    """The right to write checkpoints into `folder`, once `attempt` has returned True: the lock of a file in it, which
    the operating system gives back when the process ends. The file says who holds it, or held it last."""

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        self.folder, self.path = folder, folder / NAME
        self._end = time.monotonic() + patience
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._own = f"host {socket.gethostname()}, process {os.getpid()}, since {since}, number {uuid.uuid4().hex[:8]}"
        self._lock: Any = None

    def attempt(self, seconds: float) -> bool:
        """Take the lock if it is free; False if another run has it after `seconds`, and still may end.

        Raises PipelineError if another run keeps it, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = self._holder()
            lock = FileLock(self.path, is_singleton=True, thread_local=False)  # one for all of this process
            lock.acquire(timeout=max(0.0, min(seconds, self._end - time.monotonic())))
            self._lock = lock
            self.path.write_text(self._own)
        except Timeout:
            if time.monotonic() < self._end:
                return False
            text = f"{self.folder} is being written by another run: {holder or 'it does not say which'}."
            raise PipelineError(f"{text} Stop that run, or name another folder.") from None
        except FileExistsError:
            what = f"a link to {self.folder.readlink()}, which does not exist" if self.folder.is_symlink() else "a file"
            raise PipelineError(f"no checkpoint can be written to {self.folder}: it is {what}.") from None
        except OSError as error:
            self.close()
            raise PipelineError(f"no checkpoint can be written to {self.folder}: {error.strerror}.") from None
        return True

    def keep(self) -> None:
        """Take the lock again, with a notice, if the folder was removed or emptied: no other run can hold it then.

        Raises PipelineError if another run has the folder.
        """
        if not self.path.exists() and not (self.folder.is_dir() and any(self.folder.iterdir())):
            self.close()
            if self.attempt(0):
                print(f"zbcompile: {self.folder} was removed; it is made anew.", file=sys.stderr, flush=True)
        self.require_held()

    def require_held(self) -> None:
        """Raise PipelineError if the file has been replaced: of a run that made the folder anew, or that got the
        lock because a file server had lost it."""
        if (holder := self._holder()) != self._own:
            raise PipelineError(
                f"the lock of {self.folder} was {f'taken over by {holder}' if holder else 'removed'}; this run must no "
                "longer write there. Name another folder, or stop one of the runs."
            )

    def _holder(self) -> str:
        try:
            return read_text(self.path, ValueError, 1000)
        except (OSError, ValueError):
            return ""

    def close(self) -> None:
        """Give the folder back; does nothing if it is not held. A run that has opened the file meanwhile then holds a
        file that is gone, and notices by `require_held`."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a file that stays says who was here last
                if self._holder() in ("", self._own):
                    self.path.unlink()
            self._lock.release()
            self._lock = None
