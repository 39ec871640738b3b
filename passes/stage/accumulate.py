"""Accumulation: a pass adds the gradients of its weights into buffers that last for a step.

Most are computed in W or BW; those that are no products, such as of a norm's weight, in B.

By default the operation that computes a gradient adds it, if it can: a matrix product adds into the
buffer itself (addmm_, baddbmm_), an embedding adds its rows (index_add_) instead of making a whole
table, and the terms of a sum are added one by one. The buffer is viewed the other way round where
views stand between such an operation and the parameter. With `exact=True` passes return
whole gradients, and the engine adds them, as autograd's AccumulateGrad does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import copy_graph, like, with_graph
from zbcompile.passes.graph.roles import ACCUMULATOR, WEIGHT_GRADIENT, Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import (
    UNSAFE_VIEW,
    FakeTensorMode,
    OpOverload,
    schema_of,
    storage_key,
)

aten = torch.ops.aten
View = tuple[OpOverload, tuple[Any, ...]]  # operator and its further arguments


def accumulate(graph: PassGraph, buffers: Mapping[str, Tensor]) -> PassGraph:
    """Returns the pass with every weight gradient added into an input instead of returned.

    Args:
        buffers: A (fake) tensor of every gradient buffer by the name of its parameter, with the
            parameter's shape and strides, in its dtype or a wider one. `add_` casts.
    """
    copied = copy_graph(graph.module.graph)
    results = list(copied.output_node().args[0])  # type: ignore[arg-type]
    pairs = list(zip(graph.outputs, results, strict=True))
    gradients = [(slot, node) for slot, node in pairs if slot.role == WEIGHT_GRADIENT]
    remaining = [(slot, node) for slot, node in pairs if slot.role != WEIGHT_GRADIENT]
    inputs = list(graph.inputs)
    places = []
    for slot, node in gradients:
        inputs.append(Slot(ACCUMULATOR, slot.name))
        places.append((_new_placeholder(copied, len(inputs) - 1, buffers[slot.name]), node))
    copied.output_node().args = (tuple(node for _, node in remaining),)
    returned = {node for _, node in remaining}
    read_often = {node for _, node in places if [n for _, n in places].count(node) > 1}
    for place, node in places:
        for part, gradient in _parts(place, node, returned | read_often):
            _add(copied, part, gradient)
    _remove_unused(copied)
    copied.lint()
    return replace(
        graph,
        module=with_graph(graph.module, copied),
        inputs=tuple(inputs),
        outputs=tuple(slot for slot, _ in remaining),
    )


def gradients_of_their_own(graph: PassGraph) -> PassGraph:
    """Returns the pass with a copy of every gradient that shares memory with another value.

    The engine keeps the first gradient of a parameter as `.grad` and adds to it in place.
    """
    copied = copy_graph(graph.module.graph)
    results = list(copied.output_node().args[0])  # type: ignore[arg-type]
    shared = {storage_key(node.meta["val"]) for node in copied.find_nodes(op="placeholder")}
    for index, (slot, node) in enumerate(zip(graph.outputs, results, strict=True)):
        key = storage_key(node.meta["val"])
        if slot.role == WEIGHT_GRADIENT and key in shared:
            with copied.inserting_before(copied.output_node()):
                results[index] = _compute(copied, node, aten.clone.default, node)
        shared.add(key)
    copied.output_node().args = (tuple(results),)
    module = with_graph(graph.module, copied)
    return replace(graph, module=module)


@dataclass(frozen=True)
class GradientPlace:
    """A gradient buffer seen through views; `value` is a fake tensor of the last view."""

    buffer: Node
    value: Tensor
    views: tuple[tuple[View, Tensor], ...] = ()

    def through(self, view: View) -> "GradientPlace | None":
        """Returns this place seen through one more view; None if the strides do not allow it."""
        operator, arguments = view
        try:
            value = operator(self.value, *arguments)
        except (RuntimeError, ValueError):  # fake tensors raise either
            return None
        return replace(self, value=value, views=(*self.views, (view, value)))


Part = tuple[GradientPlace, Node]


def _parts(place: GradientPlace, gradient: Node, shared: set[Node]) -> list[Part]:
    """Returns the operations behind a gradient that can add into the buffer, each with its place;
    the gradient itself if none can."""
    undivided = [(place, gradient)]
    if gradient.op != "call_function" or len(gradient.users) > 1 or gradient in shared:
        return undivided
    if gradient.target in _INVERSES:
        seen = place.through(_INVERSES[gradient.target](gradient))
        parts = [] if seen is None else _parts(seen, gradient.all_input_nodes[0], shared)
        return parts if any(_adds_itself(*part) for part in parts) else undivided
    if _is_sum(gradient):
        sources = gradient.all_input_nodes
        return [part for source in sources for part in _parts(place, source, shared)]
    return undivided


def _adds_itself(place: GradientPlace, gradient: Node) -> bool:
    """Returns True if the operation that computes a gradient can add it into the place."""
    if gradient.op != "call_function" or len(gradient.users) > 1:
        return False
    if gradient.target in _PRODUCTS:
        return bool(place.value.dtype == gradient.meta["val"].dtype)
    by_frequency = len(gradient.args) > 4 and gradient.args[4]
    return gradient.target is aten.embedding_dense_backward.default and not by_frequency


def _add(graph: Graph, place: GradientPlace, gradient: Node) -> None:
    """Inserts the addition right after the gradient is computed."""
    following = gradient.next
    while following.op == "placeholder":
        following = following.next
    with graph.inserting_before(following):
        buffer = place.buffer
        for (operator, arguments), value in place.views:
            buffer = _call(graph, gradient, value, operator, buffer, *arguments)
        if not _adds_itself(place, gradient):
            addition = (aten.add_.Tensor, buffer, gradient)
        elif gradient.target in _PRODUCTS:
            addition = (_PRODUCTS[gradient.target], buffer, *gradient.args)
        else:
            addition = _rows_to_add(graph, place, buffer, gradient)
        _call(graph, gradient, place.value, *addition)


def _rows_to_add(
    graph: Graph, place: GradientPlace, buffer: Node, gradient: Node
) -> tuple[Any, ...]:
    """Returns the call that adds the rows of an embedding's gradient, except those of its padding
    index."""
    rows, indices, _, padding, *_ = gradient.args
    if padding >= 0:  # type: ignore[operator]
        unused = _compute(graph, gradient, aten.eq.Scalar, indices, padding)
        unused = _compute(graph, gradient, aten.unsqueeze.default, unused, -1)
        rows = _compute(graph, gradient, aten.masked_fill.Scalar, rows, unused, 0)
    rows = _compute(graph, gradient, aten.reshape.default, rows, [-1, place.value.shape[1]])
    if rows.meta["val"].dtype != place.value.dtype:
        rows = _compute(graph, gradient, aten.to.dtype, rows, place.value.dtype)
    indices = _compute(graph, gradient, aten.reshape.default, indices, [-1])
    return aten.index_add_.default, buffer, 0, indices, rows


def _compute(graph: Graph, source: Node, operator: OpOverload, *arguments: Any) -> Node:
    """Returns a new node with the fake result of an operator, on copies in one fake mode."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in arguments]
    with FakeTensorMode():
        result = operator(*(like(v) if isinstance(v, Tensor) else v for v in values))
    return _call(graph, source, result, operator, *arguments)


def _call(graph: Graph, source: Node, value: Tensor, operator: OpOverload, *arguments: Any) -> Node:
    node = graph.call_function(operator, arguments)
    node.meta = {**source.meta, "val": value}
    return node


def _new_placeholder(graph: Graph, number: int, value: Tensor) -> GradientPlace:
    last = [*graph.find_nodes(op="placeholder")][-1:]
    with graph.inserting_after(*last) if last else graph.inserting_before():  # the beginning
        buffer = graph.placeholder(f"input_{number}")
    buffer.meta = {"val": value}
    return GradientPlace(buffer, value)


def _remove_unused(graph: Graph) -> None:
    """Removes operations that only a replaced gradient needed."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op != "call_function":
            continue
        if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
            graph.erase_node(node)


def _is_sum(node: Node) -> bool:
    """Returns True for a sum of two tensors of the shape and dtype of the sum."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    total = node.meta["val"]
    values = [source.meta["val"] for source in node.all_input_nodes]
    return all(value.shape == total.shape and value.dtype == total.dtype for value in values)


def _shape_before(node: Node) -> View:
    return aten.view.default, (list(node.all_input_nodes[0].meta["val"].shape),)


def _unpermuted(node: Node) -> View:
    order: Any = node.args[1]
    dims = range(len(order))
    return aten.permute.default, (sorted(dims, key=lambda dim: order[dim] % len(order)),)


# The view to take of a buffer for the view that its gradient goes through.
_INVERSES: Mapping[Any, Callable[[Node], View]] = {
    aten.t.default: lambda node: (aten.t.default, ()),
    aten.transpose.int: lambda node: (aten.transpose.int, node.args[1:]),
    aten.permute.default: _unpermuted,
    aten.view.default: _shape_before,
    UNSAFE_VIEW: _shape_before,
    aten.unsqueeze.default: _shape_before,
    aten.squeeze.dim: _shape_before,
    aten.squeeze.dims: _shape_before,
}
# The product that adds to its first argument, for each product.
_PRODUCTS: Mapping[Any, Any] = {
    aten.mm.default: aten.addmm_.default,
    aten.bmm.default: aten.baddbmm_.default,
}
