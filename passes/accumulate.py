"""Accumulation: what W (or BW) does with the gradients it makes.

By default each gradient is added in place into a persistent buffer, by the GEMM itself where a GEMM makes it. With
`exact=True` gradients are returned and the runtime adds them as eager's AccumulateGrad does.
"""

from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.canonical import output_values
from zbcompile.passes.costs import storage_key_of
from zbcompile.passes.pieces import Piece
from zbcompile.passes.slots import Slot
from zbcompile.passes.torch_private import is_in_place

aten = torch.ops.aten


def accumulate_in_place(piece: Piece) -> Piece:
    """Replace every gradient output by an addition into an `accumulator` input of the parameter's shape and dtype."""
    graph, outputs = _copy(piece)
    kept, inputs = [], list(piece.inputs)
    for slot, node in outputs:
        if slot.kind != "gradient":
            kept.append((slot, node))
            continue
        inputs.append(Slot("accumulator", slot.name))
        buffer = _accumulator(graph, inputs[-1], node)
        with graph.inserting_before(graph.output_node()):
            _add(graph, buffer, node)
    return _rebuild(piece, graph, tuple(inputs), kept)


def own_gradients(piece: Piece) -> Piece:
    """Make every gradient output a tensor of its own, so that it may become `.grad` without a copy at run time.

    Two parameters can share one gradient (the biases on both sides of an addition), and a gradient can be a saved
    value.
    """
    graph, outputs = _copy(piece)
    foreign = {storage_key_of(n.meta["val"]) for n in graph.find_nodes(op="placeholder") if _is_tensor(n)}
    kept: list[tuple[Slot, Node]] = []
    for slot, node in outputs:
        node = _without_transposes(node) if slot.kind == "gradient" else node
        key = storage_key_of(node.meta["val"])
        if slot.kind == "gradient" and key in foreign:
            with graph.inserting_before(graph.output_node()):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta = {**node.meta, "pass": "accumulate"}
            node = clone
        foreign.add(key)
        kept.append((slot, node))
    return _rebuild(piece, graph, piece.inputs, kept)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _copy(piece: Piece) -> tuple[Graph, list[tuple[Slot, Node]]]:
    graph = Graph()
    values: dict[Node, Node] = {}
    result = graph.graph_copy(piece.module.graph, values)
    graph.output(result)
    nodes = [values[n] for n in output_values(piece.module.graph)]
    return graph, list(zip(piece.outputs, nodes, strict=True))


def _rebuild(piece: Piece, graph: Graph, inputs: tuple[Slot, ...], outputs: list[tuple[Slot, Node]]) -> Piece:
    graph.output_node().args = ([node for _, node in outputs],)
    _drop_unused(graph)
    module = GraphModule(piece.module, graph, class_name=type(piece.module).__name__)
    return replace(piece, module=module, inputs=inputs, outputs=tuple(slot for slot, _ in outputs))


def _drop_unused(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and not is_in_place(node.target))):
            graph.erase_node(node)


def _accumulator(graph: Graph, slot: Slot, gradient: Node) -> Node:
    last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes))):
        buffer = graph.placeholder(slot.identifier)
    buffer.meta = {"slot": slot, "val": gradient.meta["val"], "pass": "accumulate"}
    return buffer


def _add(graph: Graph, buffer: Node, gradient: Node) -> None:
    product = _without_transposes(gradient, odd_too=True)
    if product.target is not aten.mm.default or len(product.users) > 1:
        added = graph.call_function(aten.add_.Tensor, (buffer, gradient))
    else:
        left, right = product.args
        if _transposed(gradient, product):
            left, right = (graph.call_function(aten.t.default, (operand,)) for operand in (right, left))  # type: ignore
        added = graph.call_function(aten.addmm_.default, (buffer, left, right))
    added.meta = {**gradient.meta, "val": buffer.meta["val"], "pass": "accumulate"}


def _without_transposes(node: Node, odd_too: bool = False) -> Node:
    """Skip pairs of transposes that cancel (with `odd_too` a single one as well)."""
    chain = [node]
    while chain[-1].target is aten.t.default and chain[-1].args[0].op == "call_function":  # type: ignore[union-attr]
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain[-1] if odd_too else chain[(len(chain) - 1) // 2 * 2]


def _transposed(node: Node, product: Node) -> bool:
    count = 0
    while node is not product:
        node, count = node.args[0], count + 1  # type: ignore[assignment]
    return count % 2 == 1
