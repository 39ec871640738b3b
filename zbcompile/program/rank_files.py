"""The files of a program directory: their names, and one rank's part of them. docs/programs.md
describes the format."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from safetensors.torch import load, save

from zbcompile.json_text import to_text
from zbcompile.model.model_info import Member, has_values
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Kind, Slot
from zbcompile.passes.operators import is_foreign
from zbcompile.passes.serialize import graph_from_data, graph_to_data, operators_in
from zbcompile.passes.stage.piece import Piece
from zbcompile.program.program import Program

MANIFEST, SCHEDULE = "manifest.json", "schedule.json"
RANK, TENSORS = "rank.json", "constants.safetensors"
VOCABULARY = "vocabulary"
Data = dict[str, Any]
Pieces = dict[str, Piece]


def piece_to_data(piece: Piece) -> Data:
    """Returns a piece as JSON values. Raises CompileError for an operation or argument that has no
    such form."""
    slots = {"inputs": piece.inputs, "outputs": piece.outputs}
    return {
        "slots": {key: list(map(list, each)) for key, each in slots.items()},
        **graph_to_data(piece.module),
    }


def piece_from_data(
    name: str, data: Data, device: torch.device, operators: Collection[str]
) -> Piece:
    """Returns the piece that `piece_to_data` wrote. Raises as `graph_from_data`."""
    if not (name.isascii() and name.isalpha()):
        raise CompileError(f"{name!r} is not the name of a pass.")
    inputs, outputs = (tuple(map(_slot, data["slots"][key])) for key in ("inputs", "outputs"))
    module = graph_from_data(data, device, operators, name)
    placeholders, results = module.graph.find_nodes(op="placeholder"), output_values(module.graph)
    if (len(placeholders), len(results)) != (len(inputs), len(outputs)):
        raise CompileError(f"{name} does not name each of its inputs and outputs.")
    if len(set(inputs)) < len(inputs) or len(set(outputs)) < len(outputs):
        raise CompileError(f"two inputs or outputs of {name} have one name.")
    for slot, node in zip(inputs, placeholders, strict=True):
        node.meta["slot"] = slot
    return Piece(name, module, inputs, outputs)


def _slot(data: Any) -> Slot:
    kind, name = data
    if kind not in get_args(Kind) or not isinstance(name, str):
        raise CompileError(
            f"{data!r:.80} is not an input or output of a graph; expected a kind and a name."
        )
    return Slot(kind, name)


def rank_file(rank: int, name: str) -> str:
    """A file of a rank: `RANK`, `TENSORS`, or a stem of `graph_files` with its ending."""
    return f"rank-{rank:04d}/{name}"


def graph_files(program: Program, rank: int) -> dict[str, int]:
    """The files of a rank's graphs, by stem: of each stage, with its number, and of its shard of
    the output layer."""
    stages = {_stem(stage): stage for stage in program.stages_of(rank)}
    return stages if program.vocabulary is None else {**stages, VOCABULARY: rank}


def _stem(stage: int) -> str:
    return f"stage-{stage:04d}"


def files_of(program: Program, rank: int) -> dict[str, bytes]:
    """One rank's part of a program: the content of each of its files."""
    own = program.stages_of(rank)
    members = [
        member for member in program.model.members if set(own) & set(program.homes[member.first])
    ]
    graphs: dict[str, Mapping[str, Piece]] = {
        _stem(stage): program.stages[stage].pieces for stage in own
    }
    if program.vocabulary is not None:
        graphs[VOCABULARY] = program.vocabulary.pieces[rank]
    pieces = [piece for group in graphs.values() for piece in group.values()]
    tensors = dict(sorted(_tensors(program, members, pieces).items()))
    dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    index = {
        "rank": rank,
        "stages": list(own),
        "parameters": {m.name: [m.dtype, list(m.shape)] for m in members if m.kind == "parameter"},
        "buffers": {m.name: [m.dtype, list(m.shape)] for m in members if m.kind == "buffer"},
        "unfilled": sorted(
            name
            for name in _unsaved(program, members)
            if not has_values(program.model.unsaved[name])
        ),
        "strides": {name: list(tensor.stride()) for name, tensor in tensors.items()},
    }
    files = {
        rank_file(rank, RANK): to_text(index, 2).encode(),
        rank_file(rank, TENSORS): save(dense),
    }
    for stem, named in graphs.items():
        data = {"pieces": {name: piece_to_data(piece) for name, piece in named.items()}}
        files[rank_file(rank, f"{stem}.json")] = to_text(data, 4).encode()
    return files


def operators_of(program: Program) -> list[str]:
    """The operators that the graphs call, as `library::operator`, if the library is not torch's
    own."""
    groups = [stage.pieces for stage in program.stages] + list(
        program.vocabulary.pieces if program.vocabulary else ()
    )
    pieces = [piece for group in groups for piece in group.values()]
    names = set[str]().union(*(operators_in(graph_to_data(piece.module)) for piece in pieces))
    return sorted({"::".join(name.split(".")[:2]) for name in names if is_foreign(name)})


def _tensors(
    program: Program, members: Collection[Member], pieces: Collection[Piece]
) -> dict[str, torch.Tensor]:
    """The values that no state dict holds: constants and buffers."""
    constants = {slot.name for piece in pieces for slot in piece.inputs if slot.kind == "constant"}
    buffers = {name: program.model.unsaved[name] for name in _unsaved(program, members)}
    found = {f"constant {name}": program.model.constants[name] for name in constants}
    return found | {
        f"buffer {name}": tensor for name, tensor in buffers.items() if has_values(tensor)
    }


def _unsaved(program: Program, members: Collection[Member]) -> set[str]:
    return {member.name for member in members} & set(program.model.unsaved)


@dataclass(frozen=True)
class RankPart:
    """One rank's part, read back: the graphs by the stem of their file, tensors by the names that
    `files_of` gave them, and the names of buffers that were saved without values."""

    pieces: dict[str, Pieces]
    tensors: dict[str, torch.Tensor]
    unfilled: tuple[str, ...]

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of one kind ("constant", "buffer") by name."""
        return {
            name.removeprefix(f"{kind} "): t
            for name, t in self.tensors.items()
            if name.startswith(f"{kind} ")
        }


def tensors_from_file(
    index: dict[str, Any], content: bytes, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of a rank, by the names that `files_of` gave them, from its file and its parsed
    index."""
    return {
        name: _laid_out(tensor.to(device), index["strides"][name])
        for name, tensor in load(content).items()
    }


def pieces_from_data(data: Data, device: torch.device, operators: Collection[str]) -> Pieces:
    """The graphs that `files_of` wrote to a file."""
    return {
        name: piece_from_data(name, piece, device, operators)
        for name, piece in data["pieces"].items()
    }


def part_from_data(
    index: dict[str, Any], pieces: dict[str, Pieces], tensors: dict[str, torch.Tensor]
) -> RankPart:
    """The part that `files_of` wrote, from its parsed index, its graphs and its tensors."""
    return RankPart(pieces, tensors, tuple(index["unfilled"]))


def _laid_out(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """`tensor` with other strides; along a stride of 0 one entry represents all."""
    if list(tensor.stride()) == stride:
        return tensor
    core = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    made = torch.empty_strided(core.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(core).expand(tensor.shape)
