"""Checks that the parts of a program that was read from files fit together: no part takes what no
other gives."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch.fx import Node

from zbcompile.errors import PipelineError
from zbcompile.model.model_info import module_of
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.stage.piece import Piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import Program

Form = tuple[tuple[int, ...], str]
Forms = dict[Slot, Form]
PASSES = ("F", "B", "W", "BW")
# What a pass besides F may return; the dtype of gradients is an option.
GRADIENTS = ("gradient", "accumulator")


def require_whole(program: Program) -> None:
    """Raises PipelineError if the parts of a program that every rank has are inconsistent."""
    names, count = {member.name for member in program.model.members}, len(program.stages)
    _require(len(names) == len(program.model.members), "two parameters or buffers have one name")
    _require(
        {member.first for member in program.model.members} <= names,
        "a tensor is tied to none of the model's",
    )
    _require(program.homes.keys() <= names, "homes of a tensor that the model lacks")
    _require(
        all(stage in range(count) for each in program.homes.values() for stage in each),
        "a home that is no stage",
    )
    for number, stage in enumerate(program.stages):
        tensors = [*stage.parameters, *stage.buffers, *stage.trained]
        known = (stage.stage, stage.original in range(count)) == (number, True)
        _require(
            known and all(number in program.homes.get(name, ()) for name in tensors),
            f"stage {number}: tensors",
        )
    for sender, receiver in pairwise(program.stages):
        sent, received = _boundary(sender.sends), _boundary(receiver.receives)
        returned = _boundary(sender.gradients_in) == _boundary(receiver.gradients_out)
        what = f"stage {receiver.stage} receives something else than stage {sender.stage} sends"
        _require(sent == received and returned, what)
    module_of(program.model)
    parts = {Slot("part", name) for stage in program.stages for name in stage.parts}
    for number, piece in program.ends.items():
        gradients = all(
            slot.kind == "gradient" and slot.name in program.trained for slot in piece.outputs
        )
        _require(
            number in range(count) and set(piece.inputs) <= parts and gradients,
            f"sums on stage {number}",
        )
    if program.output is not None:
        made = (stage in range(count) for stage, _ in program.output.made.values())
        _require(program.output.computes in FORWARDS and all(made), "what the forward computes")


def require_consistent(program: Program, rank: int) -> None:
    """Raises PipelineError if a graph of a rank takes or returns what nothing of the program gives
    or takes, or a tensor of another shape or dtype."""
    for number in program.stages_of(rank):
        stage = program.stages[number]
        expected = PASSES if program.trains else ("F",)
        _require(set(stage.pieces) == set(expected), f"stage {number}: its graphs")
        _require_same_gradients(stage)
        given = _resident(program, number) | _arriving(program, stage)
        wanted = _leaving(program, stage)
        for name in expected:
            piece, where = stage.pieces[name], f"stage {number}, {name}"
            for slot, node in _inputs(piece):
                if slot.kind not in GRADIENTS:
                    _require_form(where, slot, node, given)
                else:
                    _require(slot.name in stage.trained, f"{where}: {slot}")
            for slot, node in _results(piece):
                if slot.kind in ("saved", "part"):
                    given.setdefault(slot, _form(node))
                    _require_form(where, slot, node, given)
                elif slot.kind in GRADIENTS:
                    _require(name != "F" and slot.name in stage.trained, f"{where}: {slot}")
                else:
                    _require((name == "F") != (slot.kind == "input_gradient"), f"{where}: {slot}")
                    _require_form(where, slot, node, wanted)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PipelineError(
            f"a program that does not fit together ({what}). Compile and save the program again."
        )


def _require_same_gradients(stage: StageProgram) -> None:
    """BW returns what B and W return."""
    results = {
        name: {slot for slot in piece.outputs if slot.kind != "saved"}
        for name, piece in stage.pieces.items()
    }
    if "BW" in results:
        _require(
            results["BW"] == results["B"] | results["W"], f"stage {stage.stage}: BW is not B and W"
        )


def _boundary(specs: Mapping[str, TensorSpec]) -> list[tuple[str, Form]]:
    return [(name, (spec.shape, spec.dtype)) for name, spec in specs.items()]


def _resident(program: Program, stage: int) -> Forms:
    """Returns the batch, and the model's tensors that a stage uses."""
    inputs = program.inputs.items()
    forms = {
        Slot("input", path): (shape, dtype.removeprefix("torch."))
        for path, (shape, dtype) in inputs
    }
    members = [
        member for member in program.model.members if stage in program.homes.get(member.first, ())
    ]
    forms |= {Slot(member.kind, member.name): (member.shape, member.dtype) for member in members}  # type: ignore[arg-type]
    return forms | {
        Slot("constant", name): _form_of(tensor) for name, tensor in program.model.constants.items()
    }


def _arriving(program: Program, stage: StageProgram) -> Forms:
    forms = {
        Slot("activation", name): (spec.shape, spec.dtype) for name, spec in stage.receives.items()
    }
    forms |= {
        Slot("tangent", name): (spec.shape, spec.dtype) for name, spec in stage.gradients_in.items()
    }
    return {**forms, **_loss(program, "tangent")}


def _leaving(program: Program, stage: StageProgram) -> Forms:
    forms = {
        Slot("activation", name): (spec.shape, spec.dtype) for name, spec in stage.sends.items()
    }
    forms |= {
        Slot("input_gradient", name): (spec.shape, spec.dtype)
        for name, spec in stage.gradients_out.items()
    }
    buffers = [
        member
        for member in program.model.members
        if member.kind == "buffer" and member.name in stage.buffers
    ]
    forms |= {Slot("mutation", member.name): (member.shape, member.dtype) for member in buffers}
    if (
        program.output is None
    ):  # a step whose outputs were asked for computes them, but a saved one returns none
        forms |= {
            slot: _form(node) for slot, node in _results(stage.pieces["F"]) if slot.kind == "output"
        }
    else:
        made = program.output.made.items()
        forms |= {
            Slot("output", name): (spec.shape, spec.dtype)
            for name, (at, spec) in made
            if at == stage.stage
        }
    return {**forms, **_loss(program, "loss")}


def _loss(program: Program, kind: Any) -> Forms:
    return {Slot(kind, name): ((), program.loss_dtype) for name in ("", "loss", "tangent")}


def _require_form(where: str, slot: Slot, node: Node, forms: Forms) -> None:
    if slot not in forms:
        raise PipelineError(
            f"{where}: the graph names {slot}, and nothing of the program is called so."
        )
    if forms[slot] != _form(node):
        raise PipelineError(f"{where}: {slot} is {forms[slot]}, and the graph has {_form(node)}.")


def _inputs(piece: Piece) -> Iterator[tuple[Slot, Node]]:
    return zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)


def _results(piece: Piece) -> Iterator[tuple[Slot, Any]]:
    return zip(piece.outputs, output_values(piece.module.graph), strict=True)


def _form(node: Node) -> Form:
    return _form_of(node.meta["val"])


def _form_of(value: Any) -> Form:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")
