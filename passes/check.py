"""Checks of pass graphs: what every later part of the library relies on.

A violation is a bug of the compiler, not of the model.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

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
    for label, graph in passes.items():
        values = dict(zip(graph.inputs, graph.placeholders, strict=True))
        for slot, node in values.items():
            if slot.role not in MESSAGES or slot in of_shards:
                continue
            makers = [passes[maker] for maker in _makers(label, slot.role) if maker in passes]
            results = [
                dict(zip(maker.outputs, maker.results, strict=True)).get(slot) for maker in makers
            ]
            present = [result for result in results if result is not None]
            _require(bool(present), label, f"a pass that makes {slot}")
            _require(_spec(present[0]) == _spec(node), label, f"{slot} as it is made")
    received = {
        (maker, slot)
        for label, graph in passes.items()
        for slot in graph.inputs
        if slot.role in MESSAGES
        for maker in _makers(label, slot.role)
    }
    for label, graph in passes.items():
        for slot in graph.outputs:
            if slot.role in MESSAGES and slot not in of_shards:
                _require((label, slot) in received, label, f"a reader of {slot}")


def _shard_slots(step: StepGraph) -> set[Slot]:
    """Returns what stages exchange with vocabulary shards."""
    values = step.vocabulary_values
    if values is None:
        return set()
    activations, gradients = (
        (values.hidden, values.lookup),
        (
            values.hidden_gradient,
            values.lookup_gradient,
        ),
    )
    slots = {Slot(ACTIVATION, node.name) for node in activations if node is not None}
    return slots | {Slot(GRADIENT, node.name) for node in gradients if node is not None}


def _makers(label: Label, role: str) -> Iterator[Label]:
    """Yields the passes that may make an input of this role."""
    stage = label.stage
    if role == ACTIVATION:
        yield Label(stage - 1, FORWARD)
    elif role == GRADIENT:
        yield Label(stage + 1, BACKWARD)
    elif role == SAVED:
        yield Label(stage, FORWARD)
        if label.kind == WEIGHT:
            yield Label(stage, BACKWARD)
    elif role == PART:
        for sender in range(1024):
            for kind in (FORWARD, BACKWARD, WEIGHT):
                yield Label(sender, kind)


def _check_results(step: StepGraph, passes: Mapping[Label, PassGraph]) -> None:
    returned = Counter(slot for graph in passes.values() for slot in graph.outputs)
    expected = Counter({Slot(LOSS, "loss"): int(step.loss is not None)})
    for name, node in step.gradients.items():
        if node is not None:
            expected[Slot(WEIGHT_GRADIENT, name)] = 1
    for name, sums in step.stage_gradients.items():
        expected[Slot(WEIGHT_GRADIENT, name)] = len(sums)
    expected.update(Slot(BUFFER_UPDATE, name) for name in step.buffer_updates)
    outputs = enumerate(step.outputs)
    expected.update(Slot(OUTPUT, str(index)) for index, node in outputs if node is not None)
    expected.update(Slot(FITS, str(index)) for index in range(len(step.fits)))
    if step.vocabulary_values is not None:
        names = {node.name for node in step.vocabulary_values.results()}
        expected.update(slot for slot in _shard_slots(step) if slot.name in names)
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
