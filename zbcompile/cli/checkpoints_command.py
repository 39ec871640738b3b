"""The checkpoints command: look after folders of checkpoints."""

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from tabulate import tabulate

from zbcompile.cli.command_line import Command
from zbcompile.errors import PipelineError
from zbcompile.persistence.background_save import Save
from zbcompile.persistence.checkpoint_directory import begin, candidates, prune
from zbcompile.persistence.checkpoint_record import Chunk, Record, is_pickled, read_record, require_whole
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.plain_values import Tensors, to_data
from zbcompile.persistence.saved_state import SavedState, open_state
from zbcompile.progress import Say
from zbcompile.version import __version__


def convert_checkpoint(old: Path, new: Path, trust: bool) -> Path:
    """Write the checkpoint `old`, or the newest one in that folder, into the folder `new`; the new directory.

    Raises PipelineError if it contains pickles and is not trusted, or cannot be written.
    """
    found = next(iter(candidates(old)), None)
    if found is None:
        raise PipelineError(f"{old} holds no checkpoint.")
    saved = open_state(found, trust)
    with closing(FolderLock(new)) as lock:
        while not lock.attempt(1.0):
            pass
        return _write(saved, new, lock)


def _write(saved: SavedState, new: Path, lock: FolderLock) -> Path:
    tensors: Tensors = {}
    values = {}
    for section in ("model", "optimizer", "ema"):
        room = {key: torch.empty(each[1], dtype=each[0]) if each else None for key, each in saved.keys(section).items()}
        for key, value in saved.read(room, section).items():
            name = f"{section}.{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                values[name] = to_data(value, name, {})
    kept: Tensors = {}
    process = {name: to_data(saved.process_value(name), name, kept) for name in ("random", "extra")}
    tensors |= {f"process.{name}": tensor for name, tensor in kept.items()}
    fields = {"zbcompile": __version__, "torch": torch.__version__, "step": saved.step, "ranks": 1}
    fields |= {"optimizer": saved.optimizer, "tied": {}, "values": values, "process": process}
    fields |= {"ema": saved.averaged}
    chunks = [Chunk(name, tuple(t.shape), (0,) * t.dim(), t.detach().contiguous()) for name, t in tensors.items()]
    save = Save(begin(new, saved.step), 0, 1, chunks, fields, None, lock)
    return save.run()


def verify(path: Path) -> None:
    """Compare every file of a checkpoint, or of a folder of them, with its checksum. Raises PipelineError."""
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
    with closing(FolderLock(path)) as lock:
        while not lock.attempt(1.0):
            pass
        for each in prune(path, {*whole[:keep], *filter(is_pickled, _found(path))}):
            print(f"removed {each}")


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


def _run(chosen: argparse.Namespace, say: Say) -> None:
    run: dict[str, Callable[[], None]] = {
        "verify": lambda: verify(chosen.folder),
        "list": lambda: print_list(chosen.folder),
        "prune": lambda: prune_folder(chosen.folder, chosen.keep),
        "convert": lambda: print(convert_checkpoint(chosen.folder, chosen.new, chosen.trust)),
    }
    say(f"{chosen.command} {chosen.folder}")
    run[chosen.command]()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "compare every file with its checksum"),
        ("list", "print a table"),
        ("prune", "remove all but the newest whole ones, and what interrupted saves left"),
        ("convert", "write a checkpoint that contains pickles in this release's format, in one process"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", metavar="OLD" if name == "convert" else "DIR", type=Path)
        if name == "prune":
            command.add_argument("--keep", type=int, required=True, metavar="N", help="checkpoints to keep")
        if name == "convert":
            command.add_argument("new", metavar="NEW", type=Path, help="the folder to write the new one into")
            command.add_argument("--trust", action="store_true", help="read pickles, which can run any code")


DESCRIPTION = "Look after folders of checkpoints. DIR is a folder, or one checkpoint in it."
main = Command("checkpoints", DESCRIPTION, "Something damaged is an error. ", _add_arguments, _run)
