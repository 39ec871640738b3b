"""Checks of pass graphs: what every later part of the library relies on.

A violation is a bug of the compiler, not of the model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from torch.fx import Node

from zbcompile.passes.errors import VerificationError
from zbcompile.passes.graph.fx import is_random, tensors_of
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
    Slot,
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
MESSAGES = (ACTIVATION, GRADIENT, SAVED, PART)


def check_pass_graphs(
    step: StepGraph, passes: Mapping[Label, PassGraph], fused: Mapping[int, PassGraph]
) -> None:
    """Raises VerificationError unless the passes are consistent.

    Every value that a pass reads is made by the pass that precedes it on the value's way, with
    equal shape and strides. Every result of the step is returned exactly once. Random numbers are
    drawn once, in F. Buffers that the step writes are read by F alone. Nothing works in place.
    """
    for label, graph in passes.items():
        graph.module.graph.lint()
        _check_pass(step, label, graph)
    for stage, graph in fused.items():
        graph.module.graph.lint()
        _check_fused(graph, [passes[label] for label in passes if label.stage == stage])
    _check_messages(step, passes)
    _check_results(step, passes)


def _check_pass(step: StepGraph, label: Label, graph: PassGraph) -> None:
    _require(len(graph.placeholders) == len(graph.inputs), label, "one slot per placeholder")
    _require(len(graph.results) == len(graph.outputs), label, "one slot per result")
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


def _check_fused(fused: PassGraph, passes: list[PassGraph]) -> None:
    """Checks that BW reads and returns what B and W read and return, but for what B saves for W."""
    parts = [graph for graph in passes if graph.kind in (BACKWARD, WEIGHT)]
    internal = {
        slot
        for graph in parts
        if graph.kind == BACKWARD
        for slot in graph.outputs
        if slot.role == SAVED
    }
    label = Label(fused.stage, BACKWARD + WEIGHT)
    inputs = {slot for graph in parts for slot in graph.inputs} - internal
    outputs = {slot for graph in parts for slot in graph.outputs} - internal
    _require(set(fused.inputs) == inputs, label, "the inputs of B and W")
    _require(set(fused.outputs) == outputs, label, "the outputs of B and W")


def _check_messages(step: StepGraph, passes: Mapping[Label, PassGraph]) -> None:
    of_shards = _shard_slots(step)
    results = {
        (label, slot): node
        for label, graph in passes.items()
        for slot, node in graph.returns
        if slot.role in MESSAGES and slot not in of_shards
    }
    received: set[tuple[Label, Slot]] = set()
    for label, graph in passes.items():
        for slot, node in graph.arguments:
            if slot.role in MESSAGES and slot not in of_shards:
                makers = [(maker, slot) for maker in _makers(label, slot.role, passes)]
                makers = [maker for maker in makers if maker in results]
                _require(bool(makers), label, f"a pass that makes {slot}")
                _require(_spec(results[makers[0]]) == _spec(node), label, f"{slot} as it is made")
                received.update(makers)
    for label, slot in results:
        _require((label, slot) in received, label, f"a reader of {slot}")


def _shard_slots(step: StepGraph) -> set[Slot]:
    """Returns what stages exchange with vocabulary shards."""
    slots = (*step.inputs().values(), *(slot for slot, _ in step.results()))
    return {slot for slot in slots if slot.role in (ACTIVATION, GRADIENT)}


def _makers(label: Label, role: str, passes: Iterable[Label]) -> list[Label]:
    """Returns the passes that may make an input of this role."""
    stage, kind = label
    if role == PART:
        return [maker for maker in passes if maker.kind != END]
    if role == ACTIVATION:
        return [Label(stage - 1, FORWARD)]
    if role == GRADIENT:
        return [Label(stage + 1, BACKWARD)]
    return [Label(stage, maker) for maker in (FORWARD, BACKWARD)[: 1 + (kind == WEIGHT)]]


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


def _spec(node: Node) -> list[tuple[object, ...]]:
    return [(t.dtype, t.device, tuple(t.shape), t.stride()) for t in tensors_of(node)]


def _require(condition: bool, label: Label, expected: str) -> None:
    if not condition:
        raise VerificationError(f"pass {label}: expected {expected}")
