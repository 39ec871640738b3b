"""Reading a program directory: every file is compared with its hash, and nothing in it is executed."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
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
    part_from_files,
    tensor_file,
)
from zbcompile.schedules import ScheduleError
from zbcompile.schedules.ir.files import from_json
from zbcompile.schedules.ir.schedule import Lowered

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, SyntaxError, ScheduleError)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a program directory. Raises PipelineError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise PipelineError(
            f"{folder} has no {MANIFEST}: it is not a program, or saving it was interrupted. {AGAIN}: "
            "pipe.program.save(directory)."
        )
    return manifest_from_text(path.read_text(encoding="utf-8", errors="replace"), str(path))


def read_program(
    folder: Path, manifest: dict[str, Any], own: Sequence[int], device: torch.device, operators: Collection[str] = ()
) -> SavedProgram:
    """The program with the graphs of the ranks `own`, its tensors on `device`. Raises as `load` does."""
    reader = _Reader(folder, manifest["files"])
    return reader.sound(lambda: _assemble(manifest, reader, own, device, operators))


def _assemble(
    data: dict[str, Any], reader: "_Reader", own: Sequence[int], device: torch.device, operators: Collection[str]
) -> SavedProgram:
    lowered = from_json(reader.bytes(SCHEDULE).decode()).program
    if not isinstance(lowered, Lowered):
        raise ValueError(f"{SCHEDULE} has no communication")
    program = program_from_manifest(data, lowered, device)
    for rank in own:
        files = graph_files(program, rank)
        graphs = {stem: reader.json(graph_file(rank, stem)) for stem in files}
        content = reader.bytes(tensor_file(rank))
        part = part_from_files(reader.json(index_file(rank)), graphs, files, content, device, operators)
        program = _with_part(program, rank, part)
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

    def __init__(self, folder: Path, hashes: Mapping[str, str]) -> None:
        self.folder = folder
        self.hashes = hashes

    def bytes(self, name: str) -> bytes:
        """The content of a file. Raises PipelineError if it is missing or was changed."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PipelineError(
                f"{path} cannot be read ({error.strerror}); the program is incomplete. Copy all of the directory, or "
                "save it again."
            ) from None
        if hashlib.sha256(content).hexdigest() != self.hashes[name]:
            raise PipelineError(
                f"{path} is not what was saved: its hash differs from the manifest's (truncated, edited, or from "
                "another program). Copy the directory again, or save it again."
            )
        return content

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def sound(self, make: Callable[[], SavedProgram]) -> SavedProgram:
        """Run `make`; report data that it cannot interpret as a damaged directory."""
        try:
            return make()
        except (PipelineError, CompileError):
            raise
        except MALFORMED as error:
            raise PipelineError(
                f"{self.folder} holds data that no release writes ({type(error).__name__}: {error}). {AGAIN}."
            ) from error
