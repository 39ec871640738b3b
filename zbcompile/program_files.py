"""The files of a program directory: their names, and one rank's part of them. docs/programs.md describes the format."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.json_text import to_text
from zbcompile.model_facts import Member
from zbcompile.passes.piece_data import Reading, foreign_operators, piece_from_data, piece_to_data, tensors_in
from zbcompile.passes.pieces import Piece
from zbcompile.passes.stage_program import StageProgram
from zbcompile.program import Program
from zbcompile.tensor_file import tensors_from_bytes, tensors_to_bytes

MANIFEST, SCHEDULE = "manifest.json", "schedule.json"
Pieces = dict[str, Piece]


def folder_of(rank: int) -> str:
    return f"rank-{rank:04d}"


def index_file(rank: int) -> str:
    return f"{folder_of(rank)}/rank.json"


def stage_file(rank: int, stage: int) -> str:
    return f"{folder_of(rank)}/stage-{stage:04d}.json"


def tensor_file(rank: int) -> str:
    return f"{folder_of(rank)}/constants.safetensors"


def files_of(program: Program, rank: int) -> dict[str, bytes]:
    """One rank's part of a program: the content of each of its files."""
    stages = [program.stages[i] for i in program.stages_of(rank)]
    content, strides = tensors_to_bytes(_tensors(program, stages))
    index = {
        "rank": rank,
        "stages": [stage.stage for stage in stages],
        "parameters": {m.name: [m.dtype, list(m.shape)] for m in _members(program, stages) if m.kind == "parameter"},
        "buffers": {m.name: [m.dtype, list(m.shape)] for m in _members(program, stages) if m.kind == "buffer"},
        "strides": strides,
    }
    files = {index_file(rank): to_text(index, 2).encode(), tensor_file(rank): content}
    for stage in stages:
        files[stage_file(rank, stage.stage)] = to_text(_stage_to_data(stage), 4).encode()
    return files


def _stage_to_data(stage: StageProgram) -> dict[str, Any]:
    return {"stage": stage.stage, "pieces": {name: piece_to_data(piece) for name, piece in stage.pieces.items()}}


def operators_of(program: Program) -> list[str]:
    """The operators that the graphs call, as `library::operator`, where the library is not torch's own."""
    pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
    return sorted(set().union(*(foreign_operators(piece_to_data(piece)) for piece in pieces)))


def _members(program: Program, stages: list[StageProgram]) -> list[Member]:
    own = {stage.stage for stage in stages}
    return [member for member in program.model.members if own & set(program.homes[member.first])]


def _tensors(program: Program, stages: list[StageProgram]) -> dict[str, torch.Tensor]:
    """The values that no state dict holds: constants, buffers, and tensors inside the graphs."""
    pieces = [(stage.stage, piece) for stage in stages for piece in stage.pieces.values()]
    constants = {slot.name for _, piece in pieces for slot in piece.inputs if slot.kind == "constant"}
    buffers = {member.name for member in _members(program, stages)} & set(program.model.unsaved)
    found = {f"constant {name}": program.model.constants[name] for name in constants}
    found |= {f"buffer {name}": program.model.unsaved[name] for name in buffers}
    for stage, piece in pieces:
        found |= tensors_in(piece.module, _prefix(stage, piece.name))
    return found


def _prefix(stage: int, piece: str) -> str:
    return f"graph {stage}.{piece}."


@dataclass(frozen=True)
class RankPart:
    """One rank's part, read back: the graphs of its stages, and tensors by the names that `files_of` gave them."""

    pieces: dict[int, Pieces]
    tensors: dict[str, torch.Tensor]

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of one kind ("constant", "buffer") by name."""
        return {name.removeprefix(f"{kind} "): t for name, t in self.tensors.items() if name.startswith(f"{kind} ")}


def part_from_files(
    index: dict[str, Any],
    stages: dict[int, dict[str, Any]],
    content: bytes,
    device: torch.device,
    foreign: Collection[str],
) -> RankPart:
    """What `files_of` wrote, from its parsed files."""
    tensors = tensors_from_bytes(content, index["strides"], device)
    reading = Reading(device, tensors, foreign)
    pieces = {
        stage: {
            name: piece_from_data(name, piece, reading, _prefix(stage, name), f"{name}{stage}")
            for name, piece in data["pieces"].items()
            if name.isidentifier()
        }
        for stage, data in stages.items()
    }
    return RankPart(pieces, tensors)
