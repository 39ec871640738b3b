"""The checkpoints command: look after folders of checkpoints."""

import argparse
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from zbcompile.cli.command_line import Command
from zbcompile.errors import PipelineError
from zbcompile.persistence.checkpoint_directory import candidates, prune
from zbcompile.persistence.folder_lock import FolderLock
from zbcompile.persistence.saved_state import open_state
from zbcompile.progress import Say
from zbcompile.tables import Figure, grid


def verify(path: Path) -> None:
    """Compare every file of a checkpoint, or of a folder of them, with its checksum. Raises PipelineError."""
    damaged = []
    for each in _found(path):
        try:
            saved = open_state(each)
            saved.require_whole()
            print(f"{each}: whole, {saved.bytes} bytes in {len(saved.files)} files")
        except PipelineError as error:
            damaged.append(each.name)
            print(f"{each}: {error}")
    if damaged:
        raise PipelineError(f"{len(damaged)} damaged: {', '.join(damaged)}.")


def print_list(path: Path) -> None:
    """A table of the checkpoints in a folder, from their records alone."""
    print(grid([_row(each) for each in reversed(_found(path))]))


def prune_folder(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints of a folder, and the remains of interrupted saves."""
    if keep < 1:
        raise PipelineError(f"--keep {keep}; expected at least 1.")
    whole = [each for each in _found(path) if _is_whole(each)]
    if not whole:
        raise PipelineError(f"{path} holds no whole checkpoint; nothing was removed.")
    with closing(FolderLock(path)) as lock:
        while not lock.attempt(1.0):
            pass
        for each in prune(path, whole[:keep]):
            print(f"removed {each}")


def _found(path: Path) -> list[Path]:
    found = candidates(path)
    if not found:
        raise PipelineError(f"{path} holds no checkpoint." if path.is_dir() else f"there is no folder {path}.")
    return found


def _row(path: Path) -> list[Figure]:
    names, state = ("step", "ranks", "tensors"), "damaged"
    counts: list[Any] = [None] * (len(names) + 1)
    with suppress(PipelineError):
        saved, state = open_state(path), "readable"
        counts = [saved.fields["step"], saved.fields["ranks"], len(saved.tensors), saved.bytes]
    figures = (Figure(name, count) for name, count in zip(names, counts, strict=False))
    return [Figure("checkpoint", path.name), *figures, Figure("size", counts[-1], "B"), Figure("state", state)]


def _is_whole(path: Path) -> bool:
    try:
        open_state(path).require_whole()
    except PipelineError:
        return False
    return True


def _run(chosen: argparse.Namespace, say: Say) -> None:
    say(f"{chosen.command} {chosen.folder}")
    if chosen.command == "prune":
        prune_folder(chosen.folder, chosen.keep)
    else:
        (verify if chosen.command == "verify" else print_list)(chosen.folder)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "compare every file with its checksum"),
        ("list", "print a table"),
        ("prune", "remove all but the newest whole ones, and what interrupted saves left"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", metavar="DIR", type=Path)
        if name == "prune":
            command.add_argument("--keep", type=int, required=True, metavar="N", help="checkpoints to keep")


DESCRIPTION = "Look after folders of checkpoints. DIR is a folder, or one checkpoint in it."
main = Command("checkpoints", DESCRIPTION, "Something damaged is an error. ", _add_arguments, _run)
