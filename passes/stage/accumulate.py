"""Accumulation: a pass adds the gradients of its weights into buffers that last for a step.

Most are computed in W or BW; those that are no products, such as of a norm's weight, in B.

By default the operation that computes a gradient adds it, if it can: a matrix product adds into the
buffer itself (addmm_, baddbmm_), an embedding adds its rows (index_add_) instead of making a whole
table, and the terms of a sum are added one by one. The buffer is viewed the other way round where
views stand between such an operation and the parameter. With `exact=True` passes return
whole gradients, and the engine adds them, as autograd's AccumulateGrad does.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import copy_graph, operator_name, with_graph
from zbcompile.passes.graph.roles import ACCUMULATOR, WEIGHT_GRADIENT, Slot
from zbcompile.passes.graph.storage import storages_behind
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import OpOverload, is_in_place, storage_key

aten = torch.ops.aten


def accumulate(graph: PassGraph, buffers: Mapping[str, Tensor]) -> PassGraph:
    """Returns the pass with every weight gradient added into an input instead of returned.

    Args:
        buffers: A fake tensor of every gradient buffer by the name of its parameter, with the
            parameter's shape and strides, in its dtype or a wider one, and of the fake mode of the
            graph. `add_` casts.
    """
    copied = copy_graph(graph.module.graph)
    results = list(copied.output_node().args[0])  # type: ignore[arg-type]
    pairs = list(zip(graph.outputs, results, strict=True))
    gradients = [(slot, node) for slot, node in pairs if slot.role == WEIGHT_GRADIENT]
    remaining = [(slot, node) for slot, node in pairs if slot.role != WEIGHT_GRADIENT]
    copied.output_node().args = (tuple(node for _, node in remaining),)
    shared = {node for _, node in remaining}
    shared |= {node for node, count in Counter(node for _, node in gradients).items() if count > 1}
    inputs = list(graph.inputs)
    start = next(node for node in copied.nodes if node.op != "placeholder")
    with copied.inserting_before(start):  # buffers, then views of them
        places = [copied.placeholder(f"input_{len(inputs) + i}") for i in range(len(gradients))]
        for place, (slot, node) in zip(places, gradients, strict=True):
            inputs.append(Slot(ACCUMULATOR, slot.name))
            place.meta = {"val": buffers[slot.name]}
            for part, gradient in _parts(place, node, shared):
                with copied.inserting_before(
                    start if gradient.op == "placeholder" else gradient.next
                ):
                    _add(part, gradient)
    copied.eliminate_dead_code()
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
    shared = storages_behind(copied.find_nodes(op="placeholder"))
    for index, (slot, node) in enumerate(zip(graph.outputs, results, strict=True)):
        key = storage_key(node.meta["val"])
        if slot.role == WEIGHT_GRADIENT and key in shared:
            with copied.inserting_before(copied.output_node()):
                results[index] = _call(node, aten.clone.default, node)
        shared.add(key)
    copied.output_node().args = (tuple(results),)
    module = with_graph(graph.module, copied)
    return replace(graph, module=module)


def _parts(place: Node, gradient: Node, shared: set[Node]) -> list[tuple[Node, Node]]:
    """Returns the operations behind a gradient that can add into the buffer, each with the view of
    the buffer that it adds to; the gradient itself if none can."""
    undivided = [(place, gradient)]
    if gradient.op != "call_function" or len(gradient.users) > 1 or gradient in shared:
        return undivided
    if (inverse := _inverse_view(gradient)) is not None:
        operator, arguments = inverse
        try:
            view = _call(gradient, operator, place, *arguments)
        except (RuntimeError, ValueError):  # the strides do not allow it
            return undivided
        parts = _parts(view, gradient.all_input_nodes[0], shared)
        return parts if any(_adds_itself(*part) for part in parts) else undivided
    if _is_sum(gradient):
        sources = gradient.all_input_nodes
        return [part for source in sources for part in _parts(place, source, shared)]
    return undivided


def _adds_itself(place: Node, gradient: Node) -> bool:
    """Returns True if the operation that computes a gradient can add it into the place."""
    if gradient.op != "call_function" or len(gradient.users) > 1:
        return False
    if operator_name(gradient) in _PRODUCTS:
        return bool(place.meta["val"].dtype == gradient.meta["val"].dtype)
    by_frequency = len(gradient.args) > 4 and gradient.args[4]
    return gradient.target is aten.embedding_dense_backward.default and not by_frequency


def _add(place: Node, gradient: Node) -> None:
    """Inserts the addition of a gradient into its place."""
    if not _adds_itself(place, gradient):
        _call(gradient, aten.add_.Tensor, place, gradient)
    elif operator_name(gradient) in _PRODUCTS:
        _call(gradient, _PRODUCTS[operator_name(gradient)], place, *gradient.args)
    else:
        _add_rows(place, gradient)


def _add_rows(place: Node, gradient: Node) -> None:
    """Adds the rows of an embedding's gradient, except those of its padding index."""
    rows, indices, _, padding, *_ = gradient.args
    if padding >= 0:  # type: ignore[operator]
        unused = _call(gradient, aten.eq.Scalar, indices, padding)
        unused = _call(gradient, aten.unsqueeze.default, unused, -1)
        rows = _call(gradient, aten.masked_fill.Scalar, rows, unused, 0)
    value = place.meta["val"]
    rows = _call(gradient, aten.reshape.default, rows, [-1, value.shape[1]])
    if rows.meta["val"].dtype != value.dtype:
        rows = _call(gradient, aten.to.dtype, rows, value.dtype)
    indices = _call(gradient, aten.reshape.default, indices, [-1])
    _call(gradient, aten.index_add_.default, place, 0, indices, rows)


def _call(source: Node, operator: OpOverload, *arguments: Any) -> Node:
    """Inserts a call with the module and the line of `source`. What works in place returns its
    first argument."""
    with torch.no_grad():
        values = map_arg(arguments, lambda node: node.meta["val"])
        value = values[0] if is_in_place(operator) else operator(*values)
    node = source.graph.call_function(operator, arguments)
    node.meta = {**source.meta, "val": value}
    return node


def _is_sum(node: Node) -> bool:
    """Returns True for a sum of two tensors of the shape and dtype of the sum."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    values = [value.meta["val"] for value in (node, *node.all_input_nodes)]
    return len({(value.shape, value.dtype) for value in values}) == 1


def _inverse_view(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns the operator and its arguments for a view of a buffer whose gradient goes through the
    view `node`; None if it is no view."""
    name = operator_name(node)
    if name in ("t", "transpose"):
        return node.target, node.args[1:]
    if name == "permute":
        order: Any = node.args[1]
        dims = range(len(order))
        return aten.permute.default, (sorted(dims, key=lambda dim: order[dim] % len(order)),)
    if name in ("view", "_unsafe_view", "unsqueeze", "squeeze"):
        return aten.view.default, (list(node.all_input_nodes[0].meta["val"].shape),)
    return None


# The product that adds to its first argument, for each product.
_PRODUCTS = {"mm": aten.addmm_.default, "bmm": aten.baddbmm_.default}
