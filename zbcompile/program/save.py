"""Saving a program: every rank writes its own part of a directory, and the manifest comes last.

A directory without a manifest is not a program, so a half-written one is never mistaken for a complete one.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import DIMENSIONS
from zbcompile.distributed.ranks import LocalRanks, Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.model_info import has_values
from zbcompile.program.manifest import manifest_to_text
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import ANSWERS, Program
from zbcompile.program.rank_files import MANIFEST, SCHEDULE, files_of, operators_of
from zbcompile.safe_files import sync, write_whole
from zbcompile.schedules.ir.files import to_json

Hashes = dict[str, tuple[int, str]]  # bytes and SHA-256 of files


def save_program(program: Program, directory: Path, ranks: Ranks) -> None:
    """Write `program` to `directory`, each process the parts of its own `ranks`; see `Program.save`."""
    what = f"saving {directory}"

    def write() -> Hashes:
        hashes: Hashes = {}
        for rank in ranks.local:
            hashes |= _write(directory, files_of(program, rank), ranks.leads)
        return hashes

    together(ranks, what, lambda: _prepare(program, directory, ranks.is_first))
    parts = gathered(ranks, together(ranks, what, write))
    hashes = together(ranks, what, lambda: _joined(parts))
    for name, each in program.also.items():
        save_program(each, directory / name, ranks)
    sizes = {label: ranks.mesh.size(label) for label in program.groups}
    together(ranks, what, lambda: _finish(program, directory, hashes, sizes) if ranks.is_first else None)


def _joined(parts: Sequence[Hashes]) -> Hashes:
    """The hash of every file. Ranks beside the pipeline share its files, so theirs must be equal."""
    found: Hashes = {}
    for name, each in (item for part in parts for item in part.items()):
        if found.setdefault(name, each) != each:
            raise PipelineError(
                f"{name} differs between ranks of one place in the pipeline: along a dimension of the mesh they have "
                "graphs, constants or unsaved buffers of their own (parts of different sizes, numbers made of the "
                "rank). A saved program has one for all of them. Shard evenly, and keep what depends on the rank in a "
                "buffer that the state dict holds."
            )
    return found


def save_here(program: Program, directory: Path) -> None:
    """Write all ranks of `program` from this process."""
    save_program(program, directory, LocalRanks(program.schedule.ranks, torch.device("cpu")))


def _prepare(program: Program, directory: Path, leads: bool) -> None:
    """Refuse a program that cannot be saved; then remove the manifest and the ranks of an older program."""
    _refuse(program)
    if not leads:
        return
    old = program_in(directory)
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def program_in(directory: Path) -> list[Path]:
    """The files of the program in `directory`, none if it is new. Raises PipelineError if no program can go there."""
    if directory.exists() and not directory.is_dir():
        raise PipelineError(f"{directory} is a file; expected a directory, or a path that does not exist yet.")
    held = sorted(directory.iterdir()) if directory.exists() else []
    for path in held:
        if not path.name.lstrip(".").startswith((MANIFEST, SCHEDULE, "rank-", ANSWERS, *FORWARDS)):
            raise PipelineError(
                f"{directory} holds other files ({path.name}); expected a new directory, or one that holds a program, "
                "which is replaced."
            )
    return held


def _refuse(program: Program) -> None:
    foreign = [label for label in program.groups if label not in DIMENSIONS]
    if foreign:
        raise PipelineError(
            f"the model's graphs communicate through {len(foreign)} process group(s) that are no dimension of mesh=; a "
            "program names its groups by dimension, and cannot be saved with others. Use mesh.get_group(dimension) in "
            "the model, and pass the whole mesh to zbcompile.pipeline."
        )
    empty = [name for name, tensor in program.model.constants.items() if not has_values(tensor)]
    if empty:
        raise PipelineError(
            f"{empty[0]} is a tensor in a plain attribute of a model that was built without memory (meta or fake), so "
            "it has no values to save. Build the model on a real device, or make it a buffer."
        )


def _write(directory: Path, files: dict[str, bytes], writes: bool = True) -> Hashes:
    """The hashes of files, which this process may have to write."""
    for name, content in files.items() if writes else ():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    for folder in {(directory / name).parent for name in files} if writes else ():
        sync(folder)
    return {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}


def _finish(program: Program, directory: Path, hashes: Hashes, sizes: dict[str, int]) -> None:
    shared = _write(directory, {SCHEDULE: to_json(program.lowered).encode()})
    text = manifest_to_text(program, {**hashes, **shared}, operators_of(program), sizes)
    _write(directory, {MANIFEST: text.encode()})
