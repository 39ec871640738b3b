"""Accumulation: what W (or BW) does with the gradients that it computes.

By default each gradient is added in place into a persistent buffer, by the GEMM itself if a GEMM makes it
(`zbcompile.passes.stage.fused_accumulation`). With `exact=True` gradients are returned and the runtime adds them as
eager's AccumulateGrad does.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import copied, like, output_values, with_graph
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.fused_accumulation import Adder, Place
from zbcompile.passes.torch_private import FakeTensorMode, is_in_place, storage_key

aten = torch.ops.aten


def accumulate_in_place(piece: Piece, buffers: Mapping[str, torch.Tensor]) -> Piece:
    """Replace every gradient output by an addition into an `accumulator` input, right where the gradient is made.

    `buffers` has a fake tensor of every gradient buffer by the name of its parameter: of the parameter's shape and
    strides, in its dtype or a wider one.
    """
    graph, outputs = _copy(piece)
    adder = Adder(graph)
    slots = list(piece.inputs)
    for slot, node in [pair for pair in outputs if pair[0].kind == "gradient"]:
        slots.append(Slot("accumulator", slot.name))
        adder.add(Place(_accumulator(graph, slots[-1], buffers[slot.name]), buffers[slot.name]), node)
    return _rebuild(piece, graph, tuple(slots), [pair for pair in outputs if pair[0].kind != "gradient"])


def own_gradients(piece: Piece) -> Piece:
    """Ensure no gradient output aliases another tensor, so that it may become `.grad` without a copy at run time.

    Two parameters can share one gradient (the biases on both sides of an addition), and a gradient can be a saved
    value.
    """
    graph, outputs = _copy(piece)
    foreign = {storage_key(t) for n in graph.find_nodes(op="placeholder") for t in tensors_of(n.meta.get("val"))}
    kept: list[tuple[Slot, Node]] = []
    for slot, node in outputs:
        node = _without_transposes(node) if slot.kind == "gradient" else node
        key = storage_key(node.meta["val"])
        if slot.kind == "gradient" and key in foreign:
            with graph.inserting_before(graph.output_node()):
                clone = graph.call_function(aten.clone.default, (node,))
            with FakeTensorMode(allow_non_fake_inputs=True):
                clone.meta = {**node.meta, "val": like(node.meta["val"]), "pass": "accumulate"}
            node = clone
        foreign.add(key)
        kept.append((slot, node))
    return _rebuild(piece, graph, piece.inputs, kept)


def _copy(piece: Piece) -> tuple[Graph, list[tuple[Slot, Node]]]:
    graph = copied(piece.module.graph)
    return graph, list(zip(piece.outputs, output_values(graph), strict=True))


def _rebuild(piece: Piece, graph: Graph, inputs: tuple[Slot, ...], outputs: list[tuple[Slot, Node]]) -> Piece:
    graph.output_node().args = ([node for _, node in outputs],)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and not is_in_place(node.target))):
            graph.erase_node(node)
    module = with_graph(piece.module, graph)
    return replace(piece, module=module, inputs=inputs, outputs=tuple(slot for slot, _ in outputs))


def _accumulator(graph: Graph, slot: Slot, value: torch.Tensor) -> Node:
    last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes))):
        buffer = graph.placeholder(slot.identifier)
    buffer.meta = {"slot": slot, "val": value, "pass": "accumulate"}
    return buffer


def _without_transposes(node: Node) -> Node:
    inner = node.args[0] if node.target is aten.t.default else None
    if isinstance(inner, Node) and inner.target is aten.t.default and inner.op == "call_function":
        return _without_transposes(inner.args[0])  # type: ignore[arg-type]
    return node
