"""Updates: bring the traces of in-place writes in a functionalised graph into a form that can be split."""

from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.torch_private import written_as

aten = torch.ops.aten


def make_copies_differentiable(graph: Graph) -> None:
    """Replace `aten.copy`, to which a write into a slice is traced, with a cast and an expand: it has no derivative
    below autograd, they do."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        into, value = node.args[:2]
        with graph.inserting_before(node):
            node.replace_all_uses_with(_as_like(graph, node, value, into))
        graph.erase_node(node)


def _as_like(graph: Graph, node: Node, value: Any, into: Any) -> Node:
    """`value` with the dtype, shape and strides of `into`."""
    wanted = into.meta["val"]
    if value.meta["val"].dtype != wanted.dtype:
        value = _call(graph, node, aten.to.dtype, (value, wanted.dtype), value.meta["val"].to(wanted.dtype))
    if value.meta["val"].shape != wanted.shape:
        shape = list(wanted.shape)
        value = _call(graph, node, aten.expand.default, (value, shape), value.meta["val"].expand(shape))
    if value.meta["val"].stride() != wanted.stride() and wanted.ndim:
        value = _call(graph, node, aten.slice_scatter.default, (into, value), wanted)
    return value


def separate_changing_buffers(graph: Graph, outputs: tuple[Slot, ...]) -> None:
    """Make views of a buffer that forward changes views of a copy, since they may be read after the change. A buffer
    whose new value is an input gets a copy of that input, which is an operation with a place in the graph."""
    (results,) = graph.output_node().args
    for slot, value in zip(outputs, results, strict=True):  # type: ignore[arg-type]
        if slot.kind != "mutation":
            continue
        for holder in _holders(graph, slot.name):
            for view in [user for user in holder.users if is_view(user)]:
                with graph.inserting_before(view):
                    view.replace_input_with(holder, _clone(graph, holder, view))
        if isinstance(value, Node) and value.op == "placeholder":
            with graph.inserting_before(graph.output_node()):
                graph.output_node().replace_input_with(value, _clone(graph, value, value))


def draw_in_memory_order(graph: Graph) -> None:
    """Draw the masks of transposed tensors in memory order, as eager does.
    `bernoulli_`, with which a dropout draws its mask, fills memory in order; `aten.bernoulli.p`, which replaces it,
    works row by row and makes a contiguous tensor. For a transposed tensor the two assign the numbers to different
    elements, so such a mask is drawn in memory order and transposed afterwards."""
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        fresh = node.args[0]
        value = fresh.meta["val"]
        if value.is_contiguous() or written_as(node).startswith("aten.bernoulli.p"):
            continue
        order = sorted(range(value.ndim), key=lambda dimension: -value.stride(dimension))
        back = [order.index(dimension) for dimension in range(value.ndim)]
        with graph.inserting_before(node):
            packed = _call(graph, node, aten.permute.default, (fresh, order), value.permute(order))
            drawn = _call(graph, node, aten.bernoulli.p, (packed, *node.args[1:]), packed.meta["val"])
            node.replace_all_uses_with(_call(graph, node, aten.permute.default, (drawn, back), value))
        graph.erase_node(node)


def _holders(graph: Graph, buffer: str) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if node.meta["slot"] == Slot("buffer", buffer)]


def _clone(graph: Graph, value: Node, source: Node) -> Node:
    return _call(graph, source, aten.clone.default, (value,), value.meta["val"])


def _call(graph: Graph, source: Node, target: Any, args: tuple[Any, ...], value: Any) -> Node:
    """A new node that comes from where `source` comes from."""
    node = graph.call_function(target, args)
    node.meta = {**source.meta, "val": value}
    node.meta.pop("slot", None)
    return node
