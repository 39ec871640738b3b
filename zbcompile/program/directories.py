"""Program directories. To save one, every rank writes its own part, and the manifest comes last: a
directory without a manifest is not a program, so a half-written one is never mistaken for a
complete one. To read one, every file is compared with its hash, and nothing in it is executed."""

import hashlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import DIMENSIONS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.model_info import has_values, on_meta
from zbcompile.passes.errors import CompileError
from zbcompile.program.consistency import require_consistent, require_whole
from zbcompile.program.manifest import (
    AGAIN,
    SavedProgram,
    in_short,
    manifest_from_text,
    manifest_to_text,
    problem_of,
    program_from_manifest,
)
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import Program
from zbcompile.program.rank_files import (
    MANIFEST,
    RANK,
    SCHEDULE,
    TENSORS,
    VOCABULARY,
    RankPart,
    files_of,
    graph_files,
    operators_of,
    part_from_data,
    pieces_from_data,
    rank_file,
    tensors_from_file,
)
from zbcompile.safe_files import read_bytes, sync, write_whole
from zbcompile.schedules import Schedule, check, from_json
from zbcompile.schedules.ir.files import to_json
from zbcompile.untrusted_text import parse_json

Hashes = dict[str, tuple[int, str]]  # bytes and SHA-256 of files


def save_program(program: Program, directory: Path, ranks: Ranks) -> None:
    """Write `program` to `directory`, each process the parts of its own `ranks`; see
    `Program.save`."""
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
    together(
        ranks, what, lambda: _finish(program, directory, hashes, sizes) if ranks.is_first else None
    )


def _joined(parts: Sequence[Hashes]) -> Hashes:
    """The hash of every file. Ranks outside the pipeline share its files, so theirs must be
    equal."""
    found: Hashes = {}
    for name, each in (item for part in parts for item in part.items()):
        if found.setdefault(name, each) != each:
            raise PipelineError(
                f"{name} differs between ranks of one place in the pipeline: along a dimension of"
                " the mesh they have graphs, constants or unsaved buffers of their own (parts of"
                " different sizes, numbers made of the rank). A saved program has one for all of"
                " them. Shard evenly, and keep what depends on the rank in a buffer that the state"
                " dict holds."
            )
    return found


def save_here(program: Program, directory: Path) -> None:
    """Write all ranks of `program` from this process."""
    save_program(program, directory, Ranks(program.schedule.ranks, torch.device("cpu")))


def _prepare(program: Program, directory: Path, leads: bool) -> None:
    """Refuse a program that cannot be saved; then remove the manifest and the ranks of an older
    program."""
    _refuse(program)
    if not leads:
        return
    old = program_in(directory)
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


_FILES = f"({re.escape(MANIFEST)}|{re.escape(SCHEDULE)})"
_OURS = re.compile(rf"{_FILES}|\.{_FILES}\.partial|rank-\d{{4,}}|{'|'.join(FORWARDS)}")


def program_in(directory: Path) -> list[Path]:
    """The files of the program in `directory`, none if it is new. Raises PipelineError if no
    program can go there."""
    if directory.exists() and not directory.is_dir():
        raise PipelineError(
            f"{directory} is a file; expected a directory, or a path that does not exist yet."
        )
    held = sorted(directory.iterdir()) if directory.exists() else []
    for path in held:
        if path.name in FORWARDS:
            program_in(path)
        if path.is_symlink() or not _OURS.fullmatch(path.name):
            raise PipelineError(
                f"{directory} holds other files ({path.name}); expected a new directory, or one"
                " that holds a program, which is replaced."
            )
    return held


def _refuse(program: Program) -> None:
    foreign = [label for label in program.groups if label not in DIMENSIONS]
    if foreign:
        raise PipelineError(
            f"the model's graphs communicate through {len(foreign)} process group(s) that are no"
            " dimension of mesh=; a program names its groups by dimension, and cannot be saved"
            " with others. Use mesh.get_group(dimension) in the model, and pass the whole mesh to"
            " zbcompile.pipeline."
        )
    empty = [name for name, tensor in program.model.constants.items() if not has_values(tensor)]
    if empty:
        raise PipelineError(
            f"{empty[0]} is a tensor in a plain attribute of a model that was built without memory"
            " (meta or fake), so it has no values to save. Build the model on a real device, or"
            " make it a buffer."
        )


def _write(directory: Path, files: dict[str, bytes], writes: bool = True) -> Hashes:
    """The hashes of files, which this process may have to write."""
    for name, content in files.items() if writes else ():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    for folder in {(directory / name).parent for name in files} if writes else ():
        sync(folder)
    return {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    }


def _finish(program: Program, directory: Path, hashes: Hashes, sizes: dict[str, int]) -> None:
    shared = _write(directory, {SCHEDULE: to_json(program.lowered).encode()})
    text = manifest_to_text(program, {**hashes, **shared}, operators_of(program), sizes)
    _write(directory, {MANIFEST: text.encode()})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a program directory. Raises PipelineError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        raise PipelineError(
            f"{folder} has no {MANIFEST}: it is not a program, or saving it was interrupted."
            f" {AGAIN}: pipe.program.save(directory)."
        )
    return manifest_from_text(read_bytes(path).decode(errors="replace"), str(path))


def read_program(
    folder: Path,
    manifest: dict[str, Any],
    own: Sequence[int],
    device: torch.device,
    operators: Collection[str] = (),
) -> SavedProgram:
    """The program with the graphs of the ranks `own`, its tensors on `device`. Raises as `load`
    does."""
    reader = _Reader(folder, manifest["files"])
    with reader.understanding(SCHEDULE):
        lowered = _lowered(reader.bytes(SCHEDULE).decode(), manifest)
    with reader.understanding(MANIFEST):
        program = program_from_manifest(manifest, lowered, device, operators)
        require_whole(program)
    for rank in own:
        with reader.understanding(rank_file(rank, RANK)):
            part = _read_part(program, rank, reader, device, operators)
            program = _with_part(program, rank, part)
            require_consistent(program, rank)
    return program


def _lowered(text: str, manifest: Mapping[str, Any]) -> Schedule:
    """The schedule of a program. Raises ValueError for one that its manifest does not describe."""
    lowered = from_json(text).schedule
    if (lowered.ranks, lowered.stages) != (manifest["ranks"], len(manifest["stages"])):
        raise ValueError("another number of ranks or stages than the manifest")
    check(lowered, weight_order="any")
    return lowered


def _read_part(
    program: SavedProgram,
    rank: int,
    reader: "_Reader",
    device: torch.device,
    operators: Collection[str],
) -> RankPart:
    index = reader.json(rank_file(rank, RANK))
    with reader.understanding(rank_file(rank, TENSORS)):
        tensors = tensors_from_file(index, reader.bytes(rank_file(rank, TENSORS)), device)
    pieces = {}
    for stem in graph_files(program, rank):
        with reader.understanding(rank_file(rank, f"{stem}.json")):
            pieces[stem] = pieces_from_data(
                reader.json(rank_file(rank, f"{stem}.json")), device, operators
            )
    return part_from_data(index, pieces, tensors)


def _with_part(program: SavedProgram, rank: int, part: RankPart) -> SavedProgram:
    """`program` with the graphs and tensors of `rank`."""
    stages = list(program.stages)
    for stem, stage in graph_files(program, rank).items():
        if stem != VOCABULARY:
            stages[stage] = replace(stages[stage], pieces=part.pieces[stem])
    vocabulary = program.vocabulary
    if vocabulary is not None:
        shards = list(vocabulary.pieces)
        shards[rank] = part.pieces[VOCABULARY]
        vocabulary = replace(vocabulary, pieces=tuple(shards))
    held = program.model
    constants, unsaved = (
        {**held.constants, **part.named("constant")},
        {**held.unsaved, **part.named("buffer")},
    )
    unsaved |= {
        member.name: on_meta(member) for member in held.members if member.name in part.unfilled
    }
    model = replace(held, constants=constants, unsaved=unsaved)
    return replace(program, stages=tuple(stages), vocabulary=vocabulary, model=model)


class _Reader:
    """Reads files of a program directory and compares each with its hash."""

    def __init__(self, folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
        self.folder = folder
        self.files = files

    def bytes(self, name: str) -> bytes:
        """The content of a file. Raises PipelineError if it is missing or was changed."""
        path, (_, sha256) = self.folder / name, self.files[name]
        content = read_bytes(path)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise PipelineError(
                f"{path} is not what was saved: its hash differs from the manifest's (truncated,"
                " edited, or from another program). Copy the directory again, or save it again."
            )
        return content

    def json(self, name: str) -> Any:
        return parse_json(self.bytes(name).decode(), ValueError)

    @contextmanager
    def understanding(self, name: str) -> Iterator[None]:
        """Inside, a file is read that anyone may have written: every error is one line that names
        it."""
        path = self.folder / name
        try:
            yield
        except (PipelineError, CompileError) as error:
            kind = CompileError if isinstance(error, CompileError) else PipelineError
            text = in_short(error)
            raise kind(text if str(self.folder) in text else f"{path}: {text}") from error
        except Exception as error:
            raise PipelineError(
                f"{path} holds data that no release writes ({problem_of(error)}). {AGAIN}."
            ) from error
