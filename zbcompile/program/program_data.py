"""A program as JSON values: the part that every rank reads, and the part of one rank.

Graphs are data that name operators (`zbcompile.passes.serialize`). Tensors that no state dict
holds are stored as safetensors in the same directory. docs/programs.md describes the format.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from zbcompile.json_text import Converters, from_plain, to_plain
from zbcompile.model.model_info import has_values, on_meta
from zbcompile.passes.capture.structures import OutputStructure
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.serialize import graph_from_data, graph_to_data
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.output import structure_from_data, structure_to_data
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule

Data = dict[str, Any]
# Fields that are stored elsewhere, or that belong to this process.
_LEFT_OUT = {"lowered", "line_operators", "groups", "changed_state", "writer", "saved"}
_STORED = [field.name for field in fields(Program) if field.name not in _LEFT_OUT]
_SPEC = [hint for name, hint in get_type_hints(TensorSpec).items() if name != "device"]


def program_to_data(program: Program) -> Data:
    """Returns what every rank reads of a program: everything but the graphs of its stages.

    Raises PipelineError for an output of a class that data cannot describe.
    """
    vocabulary = program.vocabulary
    shared = replace(
        program,
        model=replace(program.model, constants={}, unsaved={}),
        stages=tuple(replace(stage, pieces={}) for stage in program.stages),
        vocabulary=vocabulary and replace(vocabulary, pieces=()),
        output=None if program.trains else program.output,
    )
    return {name: to_plain(getattr(shared, name), _WRITERS) for name in _STORED}


def program_from_data(
    data: Data, lowered: Schedule, device: torch.device, operators: Collection[str]
) -> Program:
    """Returns the program that `program_to_data` wrote, without the graphs of its stages.

    Raises KeyError, TypeError or ValueError for data of another form.
    """
    hints, converters = get_type_hints(Program), _readers(device, operators)
    values = {name: from_plain(hints[name], data[name], converters) for name in _STORED}
    program = Program(**values, lowered=lowered, line_operators=())
    trained = {name for stage in program.stages for name in stage.trained}
    if missing := trained - program.homes.keys():
        raise ValueError(f"no stage is the home of the trained parameter {min(missing)!r}")
    if program.vocabulary is None:
        return program
    shards: tuple[Mapping[str, PassGraph], ...] = ({},) * len(program.vocabulary.bounds)
    return replace(program, vocabulary=replace(program.vocabulary, pieces=shards))


def rank_to_data(program: Program, rank: int) -> tuple[Data, dict[str, Tensor]]:
    """Returns the graphs of a rank as JSON values, and its tensors that no state dict holds.

    Raises CompileError for an operation or argument that data cannot describe.
    """
    stages = {str(stage): program.stages[stage].pieces for stage in program.stages_of(rank)}
    shard = {} if program.vocabulary is None else program.vocabulary.pieces[rank]
    groups = [*stages.values(), shard]
    slots = [slot for group in groups for piece in group.values() for slot in piece.inputs]
    constants = {slot.name for slot in slots if slot.role == "constant"}
    tensors = {f"constant {name}": program.model.constants[name] for name in sorted(constants)}
    for name, buffer in program.model.unsaved.items():
        if rank in program.holders(program.model.names[name]) and has_values(buffer):
            tensors[f"buffer {name}"] = buffer
    data = {
        "rank": rank,
        "strides": {name: list(tensor.stride()) for name, tensor in tensors.items()},
        "stages": to_plain(stages, _WRITERS),
        "vocabulary": to_plain(shard, _WRITERS),
    }
    dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return data, dense


def with_rank(
    program: Program,
    data: Data,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    operators: Collection[str],
) -> Program:
    """Returns `program` with the graphs and tensors that `rank_to_data` returned for a rank.

    Raises CompileError for an operator that a graph may not call.
    """
    converters = _readers(device, operators)
    stages, vocabulary = list(program.stages), program.vocabulary
    for number, group in from_plain(
        dict[int, dict[str, PassGraph]], data["stages"], converters
    ).items():
        stages[number] = replace(stages[number], pieces=group)
    if vocabulary is not None:
        shards = list(vocabulary.pieces)
        shards[data["rank"]] = from_plain(dict[str, PassGraph], data["vocabulary"], converters)
        vocabulary = replace(vocabulary, pieces=tuple(shards))
    model = program.model
    values: dict[str, Data] = {"constant": dict(model.constants), "buffer": dict(model.unsaved)}
    for title, tensor in tensors.items():
        kind, _, name = title.partition(" ")
        values[kind][name] = _restride(tensor.to(device), data["strides"][title])
    for member in model.members:
        if not member.saved and data["rank"] in program.holders(member.first):
            values["buffer"].setdefault(member.name, on_meta(member))
    model = replace(model, constants=values["constant"], unsaved=values["buffer"])
    return replace(program, stages=tuple(stages), vocabulary=vocabulary, model=model)


def _piece_to_data(piece: PassGraph) -> Data:
    slots = {"inputs": piece.inputs, "outputs": piece.outputs}
    fields = {"stage": piece.stage, "kind": piece.kind, "slots": to_plain(slots, {})}
    return {**fields, **graph_to_data(piece.module)}


def _piece_from_data(data: Data, device: torch.device, operators: Collection[str]) -> PassGraph:
    stage, kind = from_plain(int, data["stage"], {}), data["kind"]
    slots = from_plain(dict[str, tuple[Slot, ...]], data["slots"], {})
    name = f"{kind}{stage}".replace("-", "_")
    if not (name.isascii() and name.isidentifier()):  # it becomes the name of a class
        raise CompileError(f"{kind!r} is not the name of a pass.")
    module = graph_from_data(data, device, operators, name)
    placeholders, results = module.graph.find_nodes(op="placeholder"), output_values(module.graph)
    if (len(placeholders), len(results)) != (len(slots["inputs"]), len(slots["outputs"])):
        raise CompileError(f"{name} does not name each of its inputs and outputs.")
    return PassGraph(stage, kind, module, slots["inputs"], slots["outputs"])


def _spec_from_data(data: list[Any], device: torch.device) -> TensorSpec:
    pairs = zip(_SPEC, data, strict=True)
    shape, stride, dtype, needs_gradient = (from_plain(*pair, {}) for pair in pairs)
    dtype_named(dtype)  # raises for a name that torch lacks
    return TensorSpec(shape, stride, dtype, str(device), needs_gradient)


_WRITERS: Converters = {
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
    PassGraph: _piece_to_data,
    TensorSpec: lambda spec: [spec.shape, spec.stride, spec.dtype, spec.needs_gradient],
    OutputStructure: structure_to_data,
}


def _readers(device: torch.device, operators: Collection[str]) -> Converters:
    return {
        torch.dtype: dtype_named,
        PassGraph: lambda data: _piece_from_data(data, device, operators),
        TensorSpec: lambda data: _spec_from_data(data, device),
        OutputStructure: structure_from_data,
    }


def _restride(tensor: Tensor, stride: list[int]) -> Tensor:
    """Returns `tensor` with other strides. Along a stride of 0 one entry is stored for all."""
    if list(tensor.stride()) == stride:
        return tensor
    core = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    result = torch.empty_strided(core.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(core).expand(tensor.shape)
