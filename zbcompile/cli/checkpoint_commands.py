"""What `python -m zbcompile.checkpoints` does with folders of checkpoints."""

from pathlib import Path

from tabulate import tabulate

from zbcompile.errors import PipelineError
from zbcompile.persistence.checkpoint_directory import candidates, prune
from zbcompile.persistence.checkpoint_record import Record, is_pickled, read_record, require_whole
from zbcompile.persistence.folder_lock import FolderLock


def verify(path: Path) -> None:
    """Compare every file of a checkpoint, or of all in a folder, with its checksum. Raises PipelineError if one is
    damaged."""
    damaged = []
    for each in _found(path):
        try:
            record = read_record(each)
            require_whole(record)
            print(f"{each}: whole, {_bytes(record)} bytes in {len(record.files)} files")
        except PipelineError as error:
            damaged.append(each.name)
            print(f"{each}: {error}")
    if damaged:
        raise PipelineError(f"{len(damaged)} damaged or not readable without trust: {', '.join(damaged)}.")


def print_list(path: Path) -> None:
    """A table of the checkpoints in a folder, from their records alone."""
    print(tabulate(list(map(_row, reversed(_found(path)))), ["checkpoint", "step", "ranks", "tensors", "bytes", ""]))


def prune_folder(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints of a folder, and the remains of interrupted saves. Those that
    contain pickles stay: only reading them would tell whether they are whole."""
    if keep < 1:
        raise PipelineError(f"--keep {keep}; expected at least 1.")
    whole = [each for each in _found(path) if _is_whole(each)]
    if not whole:
        raise PipelineError(f"{path} holds no whole checkpoint; nothing was removed.")
    lock = FolderLock(path)
    try:
        while not lock.attempt(1.0):
            pass
        for each in prune(path, {*whole[:keep], *filter(is_pickled, _found(path))}):
            print(f"removed {each}")
    finally:
        lock.close()


def _found(path: Path) -> list[Path]:
    found = candidates(path)
    if not found:
        raise PipelineError(f"{path} holds no checkpoint.")
    return found


def _row(path: Path) -> tuple[object, ...]:
    try:
        record = read_record(path)
    except PipelineError:
        return path.name, "", "", "", "", "contains pickles" if is_pickled(path) else "damaged"
    fields = record.fields
    return path.name, fields["step"], fields["ranks"], len(record.tensors), _bytes(record), ""


def _bytes(record: Record) -> int:
    return sum(size for size, _ in record.files.values())


def _is_whole(path: Path) -> bool:
    try:
        require_whole(read_record(path))
    except PipelineError:
        return False
    return True
