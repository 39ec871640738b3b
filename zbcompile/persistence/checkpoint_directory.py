"""A folder of checkpoints: each one a directory that appears under its name once all of it is on
disk.

    checkpoints/step-00000020           complete: what `latest_checkpoint` finds
    checkpoints/.step-00000040.partial  being written, or left by a process that was killed

This needs only a file system with atomic renames.
"""

import re
import shutil
from pathlib import Path

from zbcompile.errors import PipelineError
from zbcompile.safe_files import sync

INDEX, PICKLED = "index.json", ".metadata"
PARTIAL, DROPPED = ".partial", ".dropped"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # a second one of the same step is step-00000020.1


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first.

    >>> checkpoints_in("nowhere")
    []
    """
    try:
        return sorted(
            (path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name)), key=_place
        )
    except (FileNotFoundError, NotADirectoryError):
        return []


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None. Half-written ones do not count."""
    return next(reversed(checkpoints_in(folder)), None)


def candidates(path: str | Path) -> list[Path]:
    """`path` itself if it is a checkpoint, damaged or not; else those in that folder, newest first:
    none if there is no such folder."""
    named = Path(path)
    is_checkpoint = any((named / name).exists() for name in (INDEX, PICKLED))
    return (
        [named]
        if is_checkpoint or (_NAME.fullmatch(named.name) and named.is_dir())
        else checkpoints_in(named)[::-1]
    )


def begin(folder: Path, step: int) -> Path:
    """A directory to write the checkpoint of `step` into; the remains of interrupted ones are
    removed.

    Only one training run may write to a folder. Raises PipelineError if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".step-*"):
            shutil.rmtree(path)
        partial = folder / f".{_new_name(folder, step)}{PARTIAL}"
        partial.mkdir()
    except OSError as error:
        what = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise PipelineError(f"no checkpoint can be written to {folder}: {what}.") from None
    return partial


def _new_name(folder: Path, step: int) -> str:
    name, attempt = f"step-{step:08d}", 0
    while (folder / name).exists():
        attempt += 1
        name = f"step-{step:08d}.{attempt}"
    return name


def final_name(partial: Path) -> Path:
    """The name that a directory gets once it is complete."""
    return partial.with_name(partial.name.removeprefix(".").removesuffix(PARTIAL))


def publish(partial: Path, keep: int | None) -> Path:
    """Give a directory that is fully written its name, and drop all but the newest `keep` up to it.
    Those that a killed process did not drop any more go first: there are never more than one too
    many."""
    final = final_name(partial)
    sync(partial)
    _drop_older(final, keep)
    partial.rename(final)
    sync(final.parent)
    _drop_older(final, keep)
    return final


def _drop_older(final: Path, keep: int | None) -> None:
    """Removes all but the newest `keep` checkpoints up to `final`. None is ever seen without some
    of its files."""
    older = [path for path in checkpoints_in(final.parent) if _place(path) <= _place(final)]
    for path in older[:-keep] if keep is not None else []:
        hidden = path.with_name(f".{path.name}{DROPPED}")
        path.rename(hidden)
        shutil.rmtree(hidden)


def _place(checkpoint: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
