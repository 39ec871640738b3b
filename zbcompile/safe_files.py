"""Files that are on disk completely or not at all, and that are read only if they are regular files of a known size."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zbcompile.errors import PipelineError
from zbcompile.untrusted_text import opened_regular


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


DESCRIPTION = 1 << 28  # bytes: no JSON description of a program or a checkpoint is larger
_BLOCK = 1 << 20


@contextmanager
def regular_file(path: Path, size: int | None = None, most: int = DESCRIPTION) -> Iterator[BinaryIO]:
    """Open a file of exactly `size` bytes, or of at most `most` if its size is not known.

    Raises PipelineError for a pipe, a device or a directory, before opening it, for another size, and if reading fails.
    """
    try:
        with opened_regular(path, PipelineError) as file:
            _require_size(path, os.fstat(file.fileno()).st_size, size, most)
            yield file
    except OSError as error:
        raise PipelineError(f"{path} cannot be read ({error.strerror}). Copy all of the directory again.") from None


def read_regular(path: Path, size: int | None = None, most: int = DESCRIPTION) -> bytes:
    """The content of a regular file; see `regular_file`."""
    with regular_file(path, size, most) as file:
        return file.read((most if size is None else size) + 1)


def sha256_of(path: Path, size: int) -> str:
    """The SHA-256 of a regular file of `size` bytes, read in blocks."""
    found = hashlib.sha256()
    with regular_file(path, size) as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _require_size(path: Path, found: int, size: int | None, most: int) -> None:
    if size is not None and found != size:
        raise PipelineError(f"{path} has {found} bytes; expected the {size} that were saved. Copy it again.")
    if found > most and size is None:
        raise PipelineError(f"{path} has {found} bytes; expected a description of at most {most}.")
