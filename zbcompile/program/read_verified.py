"""Reading a program directory: every file is compared with its hash, and nothing in it is executed."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.model.model_info import on_meta
from zbcompile.passes.errors import CompileError
from zbcompile.program.manifest import AGAIN, SavedProgram, manifest_from_text, program_from_manifest
from zbcompile.program.rank_files import (
    MANIFEST,
    SCHEDULE,
    VOCABULARY,
    RankPart,
    graph_file,
    graph_files,
    index_file,
    memory_of,
    part_from_files,
    rank_bytes,
    require_consistent,
    tensor_file,
)
from zbcompile.safe_files import read_regular
from zbcompile.schedules import Lowered, check, from_json


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a program directory. Raises PipelineError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        raise PipelineError(
            f"{folder} has no {MANIFEST}: it is not a program, or saving it was interrupted. {AGAIN}: "
            "pipe.program.save(directory)."
        )
    return manifest_from_text(read_regular(path).decode(errors="replace"), str(path))


def read_program(
    folder: Path,
    manifest: dict[str, Any],
    own: Sequence[int],
    device: torch.device,
    operators: Collection[str] = (),
    max_bytes: int | None = None,
) -> SavedProgram:
    """The program with the graphs of the ranks `own`, its tensors on `device`. Raises as `load` does."""
    reader = _Reader(folder, manifest["files"], memory_of(device) if max_bytes is None else max_bytes)
    try:
        return _assemble(manifest, reader, own, device, operators)
    except (PipelineError, CompileError):
        raise
    except Exception as error:  # of data that anyone may have written
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PipelineError(f"{folder} holds data that no release writes ({problem}). {AGAIN}.") from error


def _assemble(
    data: dict[str, Any], reader: "_Reader", own: Sequence[int], device: torch.device, operators: Collection[str]
) -> SavedProgram:
    lowered = from_json(reader.bytes(SCHEDULE).decode()).program
    if not isinstance(lowered, Lowered):
        raise ValueError(f"{SCHEDULE} has no communication")
    if (lowered.schedule.ranks, lowered.schedule.stages) != (data["ranks"], len(data["stages"])):
        raise ValueError(f"{SCHEDULE} is of another number of ranks or stages")
    check(lowered, weight_order="any")
    program = program_from_manifest(data, lowered, device, operators)
    for rank in own:
        files = graph_files(program, rank)
        graphs = {stem: reader.json(graph_file(rank, stem)) for stem in files}
        content = reader.bytes(tensor_file(rank))
        part = part_from_files(reader.json(index_file(rank)), graphs, files, content, device, operators)
        program = _with_part(program, rank, part)
        require_consistent(program, rank)
        reader.require_allowed(rank, rank_bytes(program, rank), part.bytes)
    return program


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
    constants, unsaved = {**held.constants, **part.named("constant")}, {**held.unsaved, **part.named("buffer")}
    unsaved |= {member.name: on_meta(member) for member in held.members if member.name in part.unfilled}
    model = replace(held, constants=constants, unsaved=unsaved)
    return replace(program, stages=tuple(stages), vocabulary=vocabulary, model=model)


class _Reader:
    """Reads files of a program directory and compares each with its hash."""

    def __init__(self, folder: Path, files: Mapping[str, tuple[int, str]], max_bytes: int) -> None:
        self.folder = folder
        self.files = files
        self.max_bytes = max_bytes

    def bytes(self, name: str) -> bytes:
        """The content of a file. Raises PipelineError if it is missing or was changed."""
        path, (size, sha256) = self.folder / name, self.files[name]
        self._require_limit(f"{path} has {size} bytes", size)
        content = read_regular(path, size)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise PipelineError(
                f"{path} is not what was saved: its hash differs from the manifest's (truncated, edited, or from "
                "another program). Copy the directory again, or save it again."
            )
        return content

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def require_allowed(self, rank: int, counted: int, stated: int) -> None:
        """Require that a rank's part allocates no more than it says, and than is allowed."""
        if counted > stated:
            raise PipelineError(f"rank {rank} of {self.folder} allocates {counted} bytes, and says {stated}. {AGAIN}.")
        self._require_limit(f"rank {rank} of {self.folder} allocates {counted} bytes", counted)

    def _require_limit(self, what: str, size: int) -> None:
        if size > self.max_bytes:
            raise PipelineError(
                f"{what}, more than max_bytes={self.max_bytes} allows (default: the memory of the device). If you "
                "trust the program, pass a higher max_bytes= to load."
            )
