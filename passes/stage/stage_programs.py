"""Stage programs: the pass graphs of every stage as the runtime takes them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import CompiledStep, Observer, no_observer
from zbcompile.passes.cost.node_cost import node_flops
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph import roles
from zbcompile.passes.graph.fx import graph_text, is_random
from zbcompile.passes.graph.roles import Role, Slot, TensorSpec
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.graph.strides import overlaps
from zbcompile.passes.recompute.recompute import RECOMPUTED
from zbcompile.passes.stage.accumulate import accumulate, gradients_of_their_own
from zbcompile.passes.stage.overlap import sink_waits
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.peak_memory import resident_storages
from zbcompile.passes.stage.stage_program import Crossing, Recomputation, StageProgram, tensor_spec
from zbcompile.passes.step_graph import END, Label, StepGraph


def stage_programs(
    compiled: CompiledStep, choices: CompileOptions, observe: Observer = no_observer
) -> tuple[StageProgram, ...]:
    """Returns the program of every stage: F, B, W and BW, or F alone for an evaluation."""
    step = compiled.step
    waiting = [
        {kind: sink_waits(graph) for kind, graph in _graphs_of(compiled, stage).items()}
        for stage in range(compiled.stages)
    ]
    observe("sink_waits", [graph for graphs in waiting for graph in graphs.values()])
    sums = _gradient_buffers(step, choices)
    accumulating = [
        {kind: _finish(graph, sums, choices) for kind, graph in graphs.items()}
        for graphs in waiting
    ]
    observe("accumulate", [graph for graphs in accumulating for graph in graphs.values()])
    programs: list[StageProgram] = []
    distinct: dict[Any, int] = {}
    for stage, (graphs, finished) in enumerate(zip(waiting, accumulating, strict=True)):
        work = tuple(
            (graph_text(graph.module), *(slot.role for slot in (*graph.inputs, *graph.outputs)))
            for graph in finished.values()
        )
        original = distinct.setdefault(work, stage)
        programs.append(_stage_program(compiled, stage, original, graphs, finished))
    return tuple(programs)


def end_graphs(compiled: CompiledStep) -> dict[int, PassGraph]:
    """Returns the graph that adds the gradients of several stages for one microbatch, by the stage
    that runs it at the end of a step with `exact=True`."""
    return {
        label.stage: gradients_of_their_own(graph)
        for label, graph in compiled.passes.items()
        if label.kind == END
    }


def _graphs_of(compiled: CompiledStep, stage: int) -> dict[str, PassGraph]:
    fused = {"BW": compiled.fused[stage]} if stage in compiled.fused else {}
    labels = [label for label in compiled.passes if label.stage == stage and label.kind != END]
    return {label.kind: compiled.passes[label] for label in labels} | fused


def _gradient_buffers(step: StepGraph, choices: CompileOptions) -> dict[str, torch.Tensor]:
    """Returns a fake tensor of the gradient buffer of each trained parameter."""
    names = (*step.gradients, *step.stage_gradients)
    values = {name: step.parameters[name].meta["val"] for name in names}
    return {
        name: value.new_empty_strided(
            value.shape, value.stride(), dtype=choices.dtype_of_sum(value.dtype)
        )
        for name, value in values.items()
    }


def _finish(
    graph: PassGraph, sums: Mapping[str, torch.Tensor], choices: CompileOptions
) -> PassGraph:
    """Returns the pass with its gradients added into buffers, or with `exact=True` returned."""
    if not any(slot.role == roles.WEIGHT_GRADIENT for slot in graph.outputs):
        return graph
    return gradients_of_their_own(graph) if choices.exact else accumulate(graph, sums)


def _stage_program(
    compiled: CompiledStep,
    stage: int,
    original: int,
    graphs: Mapping[str, PassGraph],
    finished: Mapping[str, PassGraph],
) -> StageProgram:
    step = compiled.step
    values = step.vocabulary_values
    input_slots = [slot for graph in finished.values() for slot in graph.inputs]
    output_slots = [slot for graph in graphs.values() for slot in graph.outputs]
    trained = dict.fromkeys(_names(output_slots, roles.WEIGHT_GRADIENT))
    trained |= {name: None for name, stages in compiled.parts.items() if stage in stages}
    updates = _names(output_slots, roles.BUFFER_UPDATE)
    return StageProgram(
        stage=stage,
        original=original,
        pieces=finished,
        receives=_messages(compiled, Label(stage - 1, "F"), roles.ACTIVATION)
        | (_from_shards(values.lookup) if stage == 0 else {}),
        sends=_messages(compiled, Label(stage, "F"), roles.ACTIVATION),
        gradients_in=_messages(compiled, Label(stage + 1, "B"), roles.GRADIENT)
        | (_from_shards(values.hidden_gradient) if stage == compiled.stages - 1 else {}),
        gradients_out=_messages(compiled, Label(stage, "B"), roles.GRADIENT),
        parameters=_names(input_slots, roles.PARAMETER),
        buffers=tuple(dict.fromkeys((*_names(input_slots, roles.BUFFER), *updates))),
        random=any(map(is_random, graphs["F"].calls)) and step.tangent is not None,
        flops={kind: graphs[kind].flops if kind in graphs else 0 for kind in ("F", "B", "W", "BW")},
        trained=tuple(trained),
        crossing=_crossing(graphs),
        recomputed=_recomputation(graphs, compiled.saved_without_recompute.get(stage, 0)),
        parts=_names(output_slots, roles.PART),
        deferred={n: d for n, d in _summed_over(compiled.step).items() if n in trained},
    )


def _summed_over(step: StepGraph) -> dict[str, tuple[str, ...]]:
    """Returns the mesh dimensions over which the engine sums each gradient after a step."""
    summed = {name: {dimension} for name, dimension in step.deferred_sums.items()}
    for name, placements in step.gradient_placements.items():
        sharding = step.shardings[name]
        dimensions = sharding.mesh.mesh_dim_names or ()
        pairs = zip(placements, sharding.placements, strict=True)
        for dimension, (gradient, parameter) in zip(dimensions, pairs, strict=True):
            if gradient != parameter:  # partial, where the parameter is a replica
                summed.setdefault(name, set()).add(dimension)
    return {name: tuple(sorted(dimensions)) for name, dimensions in summed.items()}


def _names(slots: Iterable[Slot], role: Role) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for slot in slots if slot.role == role))


def _from_shards(node: Node | None) -> dict[str, TensorSpec]:
    """Returns what a stage receives from the shards of the output layer or of the embedding."""
    return {} if node is None else {node.name: tensor_spec(node.meta["val"], needs_gradient=True)}


def _messages(compiled: CompiledStep, sender: Label, role: Role) -> dict[str, TensorSpec]:
    """Returns what a pass sends, in order. Values keep their strides, also those with gaps."""
    graph = compiled.passes.get(sender)
    sent: dict[str, TensorSpec] = {}
    for slot, node in graph.returns if graph is not None else ():
        if slot.role != role:
            continue
        value = node.meta["val"]
        if overlaps(value):
            raise PartitionError(
                f"the cut behind stage {sender.stage} would send {node.name}, whose elements "
                "overlap in memory. Cut elsewhere (balance=), or call .contiguous() on it."
            )
        sent[slot.name] = tensor_spec(value, role == roles.ACTIVATION)
    return sent


def _crossing(graphs: Mapping[str, PassGraph]) -> Crossing:
    """Returns the bytes that wait between the passes of a stage, by storage."""
    if "B" not in graphs:
        return Crossing()
    resident, by_forward = resident_storages(graphs.values()), set(graphs["F"].outputs)
    for_backward = [node for slot, node in graphs["B"].arguments if slot.role == roles.SAVED]
    for_weight = {slot: n for slot, n in graphs["W"].arguments if slot.role == roles.SAVED}
    from_forward = [node for slot, node in for_weight.items() if slot in by_forward]
    return Crossing(
        forward_to_backward=storage_bytes(for_backward, resident),
        kept=storage_bytes([*for_backward, *from_forward], resident),
        residue=storage_bytes(for_weight.values(), resident),
    )


def _recomputation(graphs: Mapping[str, PassGraph], before: int) -> Recomputation | None:
    """Returns what the backward computes again of the forward, in B; None if nothing.

    `before` are the bytes that would be kept otherwise.
    """
    again = [n for kind in ("B", "W") if kind in graphs for n in graphs[kind].calls]
    again = [node for node in again if node.meta.get(RECOMPUTED)]
    if not again:
        return None
    flops = sum(map(node_flops, again))
    return Recomputation(len(again), flops, before, _crossing(graphs).kept)
