"""Checks of pass graphs: what every later part of the library relies on.

A violation is a bug of the compiler, not of the model.
"""

from collections import Counter
from collections.abc import Mapping

from zbcompile.passes.errors import VerificationError
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.roles import (
    ACTIVATION,
    BATCH,
    BUFFER,
    BUFFER_UPDATE,
    CONSTANT,
    FITS,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    PART,
    SAVED,
    TANGENT,
    WEIGHT_GRADIENT,
)
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import BACKWARD, END, FORWARD, WEIGHT, Label, StepGraph
from zbcompile.passes.torch_private import OpOverload, schema_of

# Roles that a pass of each kind may read and return.
INPUTS = {
    FORWARD: {PARAMETER, BUFFER, CONSTANT, BATCH, ACTIVATION},
    BACKWARD: {PARAMETER, BUFFER, CONSTANT, BATCH, TANGENT, GRADIENT, SAVED},
    WEIGHT: {PARAMETER, BUFFER, CONSTANT, BATCH, SAVED, TANGENT},
    END: {PART, PARAMETER, BUFFER, CONSTANT, BATCH},
}
OUTPUTS = {
    FORWARD: {ACTIVATION, SAVED, PART, LOSS, OUTPUT, FITS, BUFFER_UPDATE},
    BACKWARD: {GRADIENT, SAVED, PART, WEIGHT_GRADIENT},
    WEIGHT: {PART, WEIGHT_GRADIENT},
    END: {WEIGHT_GRADIENT},
}


def check_pass_graphs(step: StepGraph, passes: Mapping[Label, PassGraph]) -> None:
    """Raises VerificationError unless the passes are consistent.

    Every result of the step is returned exactly once. Random numbers are drawn once, in F. Buffers
    that the step writes are read by F alone. Nothing works in place.
    """
    for label, graph in passes.items():
        _check_pass(step, label, graph)
    _check_results(step, passes)


def _check_pass(step: StepGraph, label: Label, graph: PassGraph) -> None:
    for slot in graph.inputs:
        _require(slot.role in INPUTS[label.kind], label, f"no input {slot}")
        if label.kind != FORWARD and slot.role == BUFFER:
            _require(slot.name not in step.buffer_updates, label, f"no changing {slot}")
    for slot in graph.outputs:
        _require(slot.role in OUTPUTS[label.kind], label, f"no output {slot}")
    for slots in (graph.inputs, graph.outputs):
        repeated = [str(slot) for slot, count in Counter(slots).items() if count > 1]
        _require(not repeated, label, f"each slot once, not {repeated}")
    for node in graph.calls:
        if isinstance(node.target, OpOverload):
            _require(not schema_of(node.target).is_mutable, label, f"functional {node.target}")
        if label.kind != FORWARD:
            _require(not is_random(node), label, f"random numbers in F alone, not {node.target}")


def _check_results(step: StepGraph, passes: Mapping[Label, PassGraph]) -> None:
    returned = Counter(slot for graph in passes.values() for slot in graph.outputs)
    expected = Counter(slot for slot, _ in step.results())
    for slot, count in expected.items():
        if returned[slot] != count:
            raise VerificationError(f"{slot} is returned {returned[slot]} times; expected {count}")
    drawn = sum(is_random(node) for graph in passes.values() for node in graph.calls)
    expected_draws = sum(map(is_random, step.calls()))
    if drawn != expected_draws:
        raise VerificationError(f"{drawn} random operations in passes; expected {expected_draws}")


def _require(condition: bool, label: Label, expected: str) -> None:
    if not condition:
        raise VerificationError(f"pass {label}: expected {expected}")
