"""A folder of compiled things that processes share: each is made once, by whoever comes first, and then only read.

An entry is a folder under its final name only when all of it is there: it is made under another name and renamed. Who
makes it holds a lock of the operating system, which ends with its process, so a killed one leaves neither a lock nor
half an entry; what it left is removed by the next one that makes this entry.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from zbcompile.env import CACHE
from zbcompile.errors import PipelineError

Loaded = TypeVar("Loaded")
How = Literal["compiled", "loaded"]
Make = Callable[[Path], None]  # fills an empty folder
PAUSE = 0.05  # seconds between two looks at what another process makes


@dataclass(frozen=True)
class CompileCache:
    """The entries in `folder`, by keys that are file names."""

    folder: Path

    def has(self, key: str) -> bool:
        """Whether an entry is complete."""
        return self._entry(key).is_dir()

    def obtain(
        self, wanted: Mapping[str, Make], load: Callable[[str, Path], Loaded], first: int = 0
    ) -> dict[str, tuple[Loaded, How]]:
        """Every entry of `wanted` as `load(key, folder)` reads it, and whether this process made it.

        Missing ones are made, from the `first` on; one that another process is making is left to it, and waited for
        when there is nothing else to do. Raises PipelineError where the folder cannot be written.
        """
        self._prepare()
        pending = [*list(wanted)[first:], *list(wanted)[:first]]
        found: dict[str, tuple[Loaded, How]] = {}
        while pending:
            done = {key: how for key in pending if (how := self._ensure(key, wanted[key]))}
            found |= {key: (load(key, self._entry(key)), how) for key, how in done.items()}
            pending = [key for key in pending if key not in done]
            if pending and not done:
                time.sleep(PAUSE)
        return {key: found[key] for key in wanted}

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what is in it is run
            writable = os.access(self.folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise PipelineError(
                f"{self.folder}, the folder for compiled graphs, cannot be written. Set {CACHE.name} to another."
            )

    def _ensure(self, key: str, make: Make) -> How | None:
        """How an entry came to be there; None while another process makes it."""
        if self.has(key):
            return "loaded"
        with self._lock(key) as mine:
            if not mine:
                return None
            if self.has(key):
                return "loaded"
            self._make(key, make)
        return "compiled"

    def _make(self, key: str, make: Make) -> None:
        partial = self.folder / f"{key}.partial"
        if partial.exists():  # its maker was killed: the lock was free
            shutil.rmtree(partial)
        partial.mkdir()
        make(partial)
        partial.rename(self._entry(key))

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Whether this process holds the lock of an entry inside."""
        with (self.folder / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True  # closing the file lets go of it

    def _entry(self, key: str) -> Path:
        return self.folder / key


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where compiled graphs are kept: ZBCOMPILE_CACHE, or `zbcompile` in the user's cache folder."""
    if given := CACHE.read(environment):
        return given
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zbcompile"
