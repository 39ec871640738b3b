"""Files that are on disk completely or not at all, and their contents."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from zbcompile.errors import CompileError, PipelineError


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
    return PipelineError(
        f"{path} cannot be written: {error.strerror}. Nothing that was complete before has changed."
    )


def sync(path: Path) -> None:
    """fsync a file, or a directory so that renames in it are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file. Raises PipelineError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PipelineError(
            f"{path} cannot be read ({error.strerror}). Copy all of the directory again."
        ) from None


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises PipelineError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PipelineError(
            f"{path} cannot be read ({error.strerror}). Copy all of the directory again."
        ) from None


@contextlib.contextmanager
def damage_in(path: Path, remedy: str) -> Iterator[None]:
    """Turns every error inside into one line that names the file, with the `remedy`."""
    try:
        yield
    except PipelineError as error:
        text = str(error)
        if str(path.parent) in text:
            raise
        kind = CompileError if isinstance(error, CompileError) else PipelineError
        raise kind(f"{path}: {text}") from error
    except Exception as error:
        problem = f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}"
        problem = problem.partition("\n")[0][:200]
        raise PipelineError(f"{path} is damaged or incomplete ({problem}). {remedy}.") from error
