"""Files that are on disk completely or not at all."""

import contextlib
import os
from pathlib import Path

from zbcompile.errors import PipelineError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears under its name only once all of it is on disk.

    Raises PipelineError, and leaves nothing behind, if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> PipelineError:
    """The error for a file that cannot be written, such as on a full disk."""
    return PipelineError(f"{path} cannot be written: {error.strerror}. Nothing that was complete before has changed.")


def sync(path: Path) -> None:
    """fsync a file, or a directory so that renames in it are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
