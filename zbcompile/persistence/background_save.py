"""Writing a checkpoint: every process its part, then the first one the record, at once or in a thread."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.persistence.checkpoint_directory import INDEX, final_name, publish
from zbcompile.persistence.checkpoint_record import Chunk, record_to_text, write_part
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.safe_files import cannot_write, write_whole
from zbcompile.untrusted_text import MORE_VALUES, parse_json

_PAUSE = 0.05  # seconds between two looks for the parts of other processes


@dataclass
class Save:
    """What process `number` of `count` does for one checkpoint; the first one holds `lock` and writes `fields`.

    `lost` says whether another process has been lost, and `timeout` for how many seconds the parts of other processes
    may make no progress.
    """

    partial: Path
    number: int
    count: int
    chunks: Sequence[Chunk]
    fields: Mapping[str, Any]
    keep: int | None
    lock: FolderLock | None = None
    lost: Callable[[], bool] = lambda: False
    timeout: float = 300.0

    def write_own(self) -> None:
        """Write this process's part. Raises PipelineError."""
        path = self._file("safetensors")
        try:
            entries = write_part(path, self.chunks) if self.chunks else {"files": {}, "tensors": {}}
        except OSError as error:
            raise cannot_write(path, error) from None
        write_whole(self._file("json"), json.dumps(entries).encode())

    def commit(self) -> Path:
        """Write the record, and give the directory its name, which is returned. Raises PipelineError."""
        assert self.lock is not None
        parts = [self._file("json", number) for number in range(self.count)]
        try:
            text = record_to_text(self.fields, [json.loads(part.read_text()) for part in parts])
            parse_json(text, PipelineError, f"{self.partial}: its record cannot be read again: ", MORE_VALUES)
            for part in parts:
                part.unlink()
            write_whole(self.partial / INDEX, text.encode())
            self.lock.require_held()
            return publish(self.partial, self.keep)
        except OSError as error:
            raise cannot_write(self.partial, error) from None

    def run(self) -> Path:
        """All of it, without asking another process: the first one waits for the files of the others."""
        try:
            self.write_own()
            if self.lock is None:
                return final_name(self.partial)
            self._await_parts()
            return self.commit()
        except BaseException as error:
            self._report(error)
            raise

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _report(self, error: BaseException) -> None:
        """Tell the first process. On a full disk there is room for that where the part was."""
        if self.lock is not None:
            self.abandon()
            return
        with contextlib.suppress(OSError):
            self._file("safetensors").write_text(f"rank {self.number}: {error}")
            self._file("safetensors").rename(self._file("failed"))

    def _await_parts(self) -> None:
        seen, since = None, time.monotonic()
        while missing := [n for n in range(self.count) if not self._file("json", n).exists()]:
            if failed := sorted(self.partial.glob("*.failed")):
                raise PipelineError(f"{self.partial} was not finished: {failed[0].read_text()}")
            now = [entry.stat().st_size for entry in sorted(self.partial.iterdir()) if entry.exists()]
            if now != seen:
                seen, since = now, time.monotonic()
            if self.lost() or time.monotonic() - since > self.timeout:
                raise PipelineError(f"{self.partial} was not finished: rank {missing[0]} has not written its part.")
            time.sleep(_PAUSE)

    def _file(self, ending: str, number: int | None = None) -> Path:
        return self.partial / f"part-{self.number if number is None else number:05d}.{ending}"


class FolderWriter:
    """What a pipeline keeps for the checkpoints that it writes: the lock of a folder and a save that is under way."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.lock: FolderLock | None = None
        self.pending: Future[Path] | None = None

    def take(self, folder: Path | None, lock: FolderLock | None) -> None:
        """Keep the lock of `folder`, which the first process has, in place of that of another folder."""
        if self.lock is not None:
            self.lock.close()
        self.folder, self.lock = folder, lock

    def start(self, save: Save) -> None:
        """Save in a thread. The interpreter does not end before it."""
        executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending = executor.submit(save.run)
        executor.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the save that is under way, and raise its error."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the save that is under way, and give the folder back."""
        try:
            self.finish()
        finally:
            self.take(None, None)
