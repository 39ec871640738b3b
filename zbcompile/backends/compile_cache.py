"""A folder of compiled graphs that processes share. The first process that needs a graph compiles
it; all others only read it.

An entry is a folder that gets its final name once it is complete: it is made under another name and
renamed. Its maker holds a lock of the operating system, which ends with the process, so a killed
one leaves neither a lock nor half an entry; its remains are removed by the next process that makes
this entry.

An entry is executable code. So before it is loaded its files are compared with the checksums stored
with it, and the folder must belong to this user or to root, and no other user may have permission
to write there.
"""

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from filelock import FileLock, Timeout

from zbcompile.env import CACHE
from zbcompile.errors import PipelineError
from zbcompile.safe_files import cannot_write, read_bytes, sha256_of, sync, write_whole

Loaded = TypeVar("Loaded")
How = Literal["compiled", "loaded"]
Make = Callable[[Path], None]  # fills an empty folder
Load = Callable[[str, Path], Loaded]  # of a key and its folder
PAUSE = 0.05  # seconds between two checks of an entry that another process is making


@dataclass(frozen=True)
class CompileCache:
    """The entries in `folder`, by keys that are file names."""

    folder: Path

    def has(self, key: str) -> bool:
        """Returns whether an entry is complete."""
        return self._at(key).is_dir()

    def obtain(
        self, required: Mapping[str, Make], load: Load[Loaded], first: int = 0
    ) -> dict[str, tuple[Loaded, How]]:
        """Returns every entry of `required` as `load(key, folder)` reads it, and whether this
        process made it.

        Missing entries are made in order, beginning with number `first`. An entry that another
        process is making is skipped, and polled when there is nothing else to do. An entry that
        cannot be loaded is dropped and rebuilt, with a notice. Raises PipelineError if the folder
        belongs to another user, or cannot be written and lacks an entry.
        """
        self._prepare(required)
        pending = [*list(required)[first:], *list(required)[:first]]
        entries: dict[str, tuple[Loaded, How]] = {}
        while pending:
            done = {key: how for key in pending if (how := self._ensure(key, required[key]))}
            entries |= {
                key: entry for key, how in done.items() if (entry := self._load(key, how, load))
            }
            pending = [key for key in pending if key not in entries]
            if pending and not done:
                time.sleep(PAUSE)
        return {key: entries[key] for key in required}

    def _prepare(self, required: Iterable[str]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            writable = os.access(self.folder, os.W_OK)
            self._require_own()
        except OSError:
            writable = False
        if not writable and not all(map(self.has, required)):
            raise PipelineError(
                f"{self.folder}, the folder for compiled graphs, cannot be written. Set"
                f" {CACHE.name} to another folder."
            )

    def _require_own(self) -> None:
        stats = self.folder.stat()
        if stats.st_uid not in (os.getuid(), 0) or stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PipelineError(
                f"{self.folder}, the folder for compiled graphs, belongs to user {stats.st_uid} and"
                f" has mode {stat.filemode(stats.st_mode)}: others could put code there. Set"
                f" {CACHE.name} to a folder of your own (chmod go-w)."
            )

    def _ensure(self, key: str, make: Make) -> How | None:
        """Returns "compiled" if this process made the entry, "loaded" if it was there, and None
        while another process makes it."""
        if self.has(key):
            return "loaded"
        with self._lock(key) as locked:
            if not locked:
                return None
            if self.has(key):
                return "loaded"
            self._make(key, make)
        return "compiled"

    def _load(self, key: str, how: How, load: Load[Loaded]) -> tuple[Loaded, How] | None:
        """The loaded entry; None if it was dropped."""
        try:
            self._require_same_files(key)
            return load(key, self._at(key)), how
        except (
            Exception
        ) as error:  # damaged bytes, and names that a later version moved, raise anything
            if how == "compiled":
                raise
            self._drop(key, load, error)
            return None

    def _drop(self, key: str, load: Load[Loaded], error: Exception) -> None:
        """Removes an entry that cannot be loaded, unless another process has rebuilt it since."""
        with self._lock(key) as locked:
            if not locked or self._loads(key, load):
                return
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"zbcompile: {self._at(key)} cannot be loaded ({reason}); rebuilding it.")
            partial = self._at(key, ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            self._at(key).rename(
                partial
            )  # all at once; the process that makes the entry removes it

    def _loads(self, key: str, load: Load[Loaded]) -> bool:
        try:
            self._require_same_files(key)
            load(key, self._at(key))
        except Exception:
            return not self.has(key)  # dropped by another process
        return True

    def _make(self, key: str, make: Make) -> None:
        partial = self._at(key, ".partial")
        if partial.exists():  # its maker was killed: the lock was free
            shutil.rmtree(partial)
        try:
            partial.mkdir()
            make(partial)
            write_whole(self._at(key, ".sums"), json.dumps(_checksums(partial)).encode())
            partial.rename(self._at(key))
            sync(self.folder)
        except OSError as error:  # such as a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise cannot_write(partial, error) from None

    def _require_same_files(self, key: str) -> None:
        entry = self._at(key)
        for name, sha256 in json.loads(read_bytes(self._at(key, ".sums"))).items():
            if sha256_of(entry / name) != sha256:
                raise PipelineError(f"the checksum of {name} differs")

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Context that yields whether this process holds the lock of an entry."""
        lock = FileLock(self._at(key, ".lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _at(self, key: str, ending: str = "") -> Path:
        return self.folder / f"{key}{ending}"


def _checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file; all of them, and the folders, are on the disk afterwards."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file():
            checksums[str(path.relative_to(folder))] = sha256_of(path)
    sync(folder)
    return checksums


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of compiled graphs: ZBCOMPILE_CACHE, or `zbcompile` in the user's cache folder."""
    if folder := CACHE.read(environment):
        return folder
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zbcompile"
