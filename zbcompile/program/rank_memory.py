"""How much memory a rank's part of a program may take, counted from its graphs and the model's sizes."""

import os

import torch
from torch.fx import Node

from zbcompile.errors import PipelineError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.stage.peak_memory import peak_bytes, transient_bytes
from zbcompile.program.program import Program

Form = tuple[tuple[int, ...], str]


def rank_bytes(program: Program, rank: int) -> int:
    """An upper bound of the bytes that `rank` allocates: parameters with their gradients, buffers, constants, messages
    of all microbatches, and what the largest of its passes makes."""
    stages = [program.stages[stage] for stage in program.stages_of(rank)]
    names = {name for name, homes in program.homes.items() if {*homes} & {*program.stages_of(rank)}}
    held = [(member, TensorSpec(*member[2:5], "")) for member in program.model.members if member.first in names]
    trains = program.output is None
    resident = sum(spec.bytes * (1 + (trains and member.trainable)) for member, spec in held)
    constants = sum(tensor.nbytes for tensor in program.model.constants.values())
    specs = [spec for stage in stages for each in (stage.receives, stage.gradients_in) for spec in each.values()]
    messages = program.schedule.microbatches * sum(spec.bytes for spec in specs)
    passes = [transient_bytes(stage, name) for stage in stages for name in stage.pieces]
    if program.vocabulary is not None:
        passes += [peak_bytes(piece) for piece in program.vocabulary.pieces[rank].values()]
    return resident + constants + messages + max(passes, default=0)


def memory_of(device: torch.device) -> int:
    """The bytes of memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_consistent(program: Program, rank: int) -> None:
    """Require that the graphs of a rank take what the model and each other give them.

    Raises PipelineError for an input of another shape or dtype.
    """
    members = {Slot("parameter", m.name): (m.shape, m.dtype) for m in program.model.members if m.kind == "parameter"}
    members |= {Slot("buffer", m.name): (m.shape, m.dtype) for m in program.model.members if m.kind == "buffer"}
    for number in program.stages_of(rank):
        stage = program.stages[number]
        given = dict(members)
        given |= {Slot("activation", name): (spec.shape, spec.dtype) for name, spec in stage.receives.items()}
        given |= {Slot("tangent", name): (spec.shape, spec.dtype) for name, spec in stage.gradients_in.items()}
        for piece in stage.pieces.values():
            results = output_values(piece.module.graph)
            given |= {slot: _form(node) for slot, node in zip(piece.outputs, results, strict=True)}
        for piece in stage.pieces.values():
            for slot, node in zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True):
                if given.get(slot, _form(node)) != _form(node):
                    raise PipelineError(
                        f"stage {number}, {piece.name}: {slot} is {given[slot]}, and the graph takes {_form(node)}."
                    )


def _form(node: Node) -> Form:
    value = node.meta["val"]
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")
