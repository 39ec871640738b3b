"""One writer per folder of checkpoints: a file in it that says who writes, and whose time its holder renews.

Only the first process of a run holds it. Reading a folder needs no lock.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.untrusted_text import opened_regular, read_json

NAME = ".writer"
BEAT = 2.0  # seconds between two signs of life
PATIENCE = 60.0  # seconds without one, on the reader's clock, after which a holder counts as lost
_PAUSE = 0.1
Holder = Mapping[str, Any]


class FolderLock:
    """The right to write checkpoints into `folder`, once `attempt` has returned True."""

    def __init__(self, folder: Path, beat: float = BEAT, patience: float = PATIENCE) -> None:
        self.folder, self.path = folder, folder / NAME
        self._beat, self._patience = beat, patience
        self._own = {**_identity(), "token": uuid.uuid4().hex}
        self._seen: tuple[tuple[int, int], float] | None = None
        self._ended: weakref.finalize[Any, Any] | None = None

    def attempt(self, seconds: float) -> bool:
        """Take the lock if it is free, or its holder is lost; False if that is not known after `seconds`.

        Raises PipelineError if another run holds it.
        """
        deadline = time.monotonic() + seconds
        while not self._take():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _take(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = read_holder(self.path)
            if holder is None:
                self._hold(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            elif has_ended(holder) or self._outwaited(holder):
                self._replace()
            else:
                return False
        except FileExistsError:
            if self.folder.is_dir():
                return False  # another run was faster
            what = f"a link to {self.folder.readlink()}, which does not exist" if self.folder.is_symlink() else "a file"
            raise PipelineError(f"no checkpoint can be written to {self.folder}: it is {what}.") from None
        except OSError as error:
            raise PipelineError(f"no checkpoint can be written to {self.folder}: {error.strerror}.") from None
        return True

    def _outwaited(self, holder: Holder) -> bool:
        """Whether the holder has given no sign of life for too long. Raises PipelineError once it has given one."""
        with opened_regular(self.path, PipelineError) as file:  # opening asks a file server anew
            found = os.fstat(file.fileno())
        sign, now = (found.st_ino, found.st_mtime_ns), time.monotonic()
        if self._seen is None:
            self._seen = sign, now
        if self._seen[0] != sign:
            raise PipelineError(
                f"{self.folder} is being written by another run: {described(holder)}. Stop that run, or name another "
                "folder."
            )
        return now - self._seen[1] >= self._patience

    def _replace(self) -> None:
        name = self.path.with_name(f"{NAME}.{self._own['token']}")
        handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.replace(name, self.path)
        self._hold(handle)

    def _hold(self, handle: int) -> None:
        try:
            with open(os.dup(handle), "wb") as file:
                file.write(json.dumps(self._own).encode())
        except OSError:  # a full disk
            self.path.unlink(missing_ok=True)
            raise
        stopped = threading.Event()
        threading.Thread(target=_renew, args=(handle, stopped, self._beat), name="checkpoint lock", daemon=True).start()
        self._ended = weakref.finalize(self, _release, stopped, self.path, self._own["token"])

    def keep(self) -> None:
        """Take the lock again, with a notice, if the folder was removed or emptied: nobody else can hold it then.

        Raises PipelineError if another run has taken the folder over.
        """
        gone = not self.path.exists() and not (self.folder.is_dir() and any(self.folder.iterdir()))
        if gone:
            self.close()
            if self.attempt(0):
                print(f"zbcompile: {self.folder} was removed; it is made anew.", file=sys.stderr, flush=True)
        self.require_held()

    def require_held(self) -> None:
        """Raise PipelineError if another run has taken the folder over."""
        holder = read_holder(self.path)
        if holder is None or holder.get("token") != self._own["token"]:
            by = "removed" if holder is None else f"taken over by {described(holder)}"
            raise PipelineError(
                f"the lock of {self.folder} was {by}; this run must no longer write there. Name another folder, or "
                "stop one of the runs."
            )

    def close(self) -> None:
        """Give the folder back; nothing if it is not held."""
        if self._ended is not None:
            self._ended()


def read_holder(path: Path) -> Holder | None:
    """What a lock file says; None if there is none, nothing if it cannot be read."""
    try:
        found = read_json(path, ValueError)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def described(holder: Holder) -> str:
    """The holder in a message: host, process, since when."""
    return f"host {holder.get('host')}, process {holder.get('pid')}, since {holder.get('since')}"


def has_ended(holder: Holder) -> bool:
    """Whether the holder is known to write no more: an ended process of this machine, an earlier start of the same
    elastic job, or this process itself."""
    here = _identity()
    if here["job"] is not None and holder.get("job") == here["job"]:
        return True
    pid = holder.get("pid")
    if holder.get("machine") != here["machine"] or not isinstance(pid, int):
        return False
    return pid == here["pid"] or _start_of(pid) != holder.get("started")


def _identity() -> dict[str, Any]:
    """This process; `machine` also tells containers apart that share a host name."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    boot = _content("/proc/sys/kernel/random/boot_id") or ""
    with contextlib.suppress(OSError):
        boot += os.readlink("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "machine": f"{socket.gethostname()} {boot}",
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "job": None if job in (None, "", "none") else job,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _start_of(pid: int) -> str | None:
    """When a process of this machine was started, None if it has ended; without /proc only whether it runs."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return "running"
    fields = (_content(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else None


def _content(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _renew(handle: int, stopped: threading.Event, beat: float) -> None:
    """Renew the time of the file that is open as `handle`, whatever has its name by now."""
    while not stopped.wait(beat):
        with contextlib.suppress(OSError):
            os.utime(handle)
    os.close(handle)


def _release(stopped: threading.Event, path: Path, token: str) -> None:
    stopped.set()
    with contextlib.suppress(OSError):  # a lock that stays is replaced at once when its process has ended
        if (read_holder(path) or {}).get("token") == token:
            path.unlink(missing_ok=True)
