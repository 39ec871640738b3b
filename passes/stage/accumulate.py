"""Accumulation: W (or BW) adds its gradients into persistent buffers.

By default the operation that computes a gradient adds it into its buffer, if that operation can add:
a matrix product adds into the buffer itself (addmm_, baddbmm_), an embedding adds its rows (index_add_) instead of
making a whole table, the terms of a sum are added one by one, rows that are made piece by piece each where they belong.
Between such an operation and the parameter may stand views; the buffer is then viewed the other way round. A buffer of
another dtype than the gradient takes the gradient by add_, which casts.

With `exact=True` gradients are returned and the runtime adds them as eager's AccumulateGrad does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import copied, like, output_values, with_graph
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import storages_behind
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import UNSAFE_VIEW, FakeTensorMode, is_in_place, storage_key

aten = torch.ops.aten
View = tuple[Any, tuple[Any, ...]]


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
        adder.add(GradientPlace(_accumulator(graph, slots[-1], buffers[slot.name]), buffers[slot.name]), node)
    return _rebuild(piece, graph, tuple(slots), [pair for pair in outputs if pair[0].kind != "gradient"])


def own_gradients(piece: Piece) -> Piece:
    """Ensure no gradient output aliases another tensor, so that it may become `.grad` without a copy at run time.

    Two parameters can share one gradient (the biases on both sides of an addition), and a gradient can be a saved
    value.
    """
    graph, outputs = _copy(piece)
    foreign = storages_behind(graph.find_nodes(op="placeholder"))
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


@dataclass(frozen=True)
class GradientPlace:
    """Where a gradient belongs: `buffer` seen through `views`, in order; `value` is a fake tensor of the result."""

    buffer: Node
    value: torch.Tensor
    views: tuple[View, ...] = ()

    def through(self, view: View) -> "GradientPlace | None":
        """This place seen through one more view; None if the strides do not allow it."""
        try:
            value = _on_fakes(view[0], self.value, *view[1])
        except (RuntimeError, ValueError):  # fake tensors raise either
            return None
        back = view == _TRANSPOSE and self.views[-1:] == (_TRANSPOSE,)
        return replace(self, value=value, views=self.views[:-1] if back else (*self.views, view))


class Adder:
    """Adds gradients that a graph makes into buffers, each as soon as it is made."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.returned = Counter(node for node in output_values(graph) if isinstance(node, Node))

    def add(self, place: GradientPlace, gradient: Node) -> None:
        """Add `gradient`, so far an output of the graph, into `place`."""
        for part in self._parts(place, gradient):
            with self.graph.inserting_before(_behind(self.graph, part.gradient)):
                part.rule(self, part.place, part.gradient)

    def _parts(self, place: GradientPlace, gradient: Node) -> "list[GradientTerm]":
        """The operations behind `gradient` that can add into the buffer instead; `gradient` itself if none can."""
        whole = [GradientTerm(place, gradient, Adder.whole)]
        if not self._is_alone(gradient):
            return whole
        if gradient.target in _INVERSES:
            seen = place.through(_INVERSES[gradient.target](gradient))
            parts = self._parts(seen, gradient.all_input_nodes[0]) if seen is not None else whole
            return whole if all(part.rule is Adder.whole for part in parts) else parts
        if _is_sum(gradient):
            return [part for term in gradient.all_input_nodes for part in self._parts(place, term)]
        if gradient.target is aten.cat.default and gradient.args[1:] in ((), (0,)) and not gradient.kwargs:
            return [part for rows, seen in _rows_of(place, gradient) for part in self._parts(seen, rows)]
        if gradient.target in _PRODUCTS and place.value.dtype == gradient.meta["val"].dtype:
            return [GradientTerm(place, gradient, Adder.product)]
        if gradient.target is aten.embedding_dense_backward.default and not gradient.args[4]:
            return [GradientTerm(place, gradient, Adder.rows)]
        return whole

    def _is_alone(self, node: Node) -> bool:
        """Whether only this gradient needs `node`, which can then be left out."""
        users = sum(user.op != "output" for user in node.users)
        return node.op == "call_function" and users + self.returned[node] == 1

    def whole(self, place: GradientPlace, gradient: Node) -> None:
        """Add the gradient unchanged; add_ casts."""
        self._into(place, gradient, aten.add_.Tensor, gradient)

    def product(self, place: GradientPlace, gradient: Node) -> None:
        """Add a product by the kernel that computes it."""
        self._into(place, gradient, _PRODUCTS[gradient.target], *gradient.args)

    def rows(self, place: GradientPlace, gradient: Node) -> None:
        """Add the rows of an embedding except those of its padding index."""
        rows, indices, _, padding, _ = gradient.args
        if padding >= 0:  # type: ignore[operator]
            unused = self._call(gradient, aten.eq.Scalar, indices, padding)
            unused = self._call(gradient, aten.unsqueeze.default, unused, -1)
            rows = self._call(gradient, aten.masked_fill.Scalar, rows, unused, 0)
        rows = self._call(gradient, aten.reshape.default, rows, [-1, place.value.shape[1]])
        if rows.meta["val"].dtype != place.value.dtype:
            rows = self._call(gradient, aten.to.dtype, rows, place.value.dtype)
        indices = self._call(gradient, aten.reshape.default, indices, [-1])
        self._into(place, gradient, aten.index_add_.default, 0, indices, rows)

    def _into(self, place: GradientPlace, gradient: Node, operation: Any, *arguments: Any) -> None:
        """`operation(buffer, *arguments)`, which adds `gradient`."""
        buffer = place.buffer
        for target, view in place.views:
            buffer = self._call(gradient, target, buffer, *view)
        added = self.graph.call_function(operation, (buffer, *arguments))
        added.meta = {**gradient.meta, "val": place.value, "pass": "accumulate"}

    def _call(self, source: Node, target: Any, *arguments: Any) -> Node:
        new = self.graph.call_function(target, arguments)
        new.meta = {**source.meta, "val": _on_fakes(target, *map(_value, arguments)), "pass": "accumulate"}
        return new


class GradientTerm(NamedTuple):
    """A term of a gradient, the place it belongs to, and the operation that adds it there."""

    place: GradientPlace
    gradient: Node
    rule: Callable[[Adder, GradientPlace, Node], None]


def _behind(graph: Graph, node: Node) -> Node:
    """The node before which to insert what comes right after `node`; placeholders stay first."""
    if node.op != "placeholder":
        return node.next
    return next(other for other in graph.nodes if other.op not in ("placeholder", "get_attr"))


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _on_fakes(target: Any, *arguments: Any) -> torch.Tensor:
    """The metadata of an operation's result. Values may be from different fake tensor modes, so they are made anew."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fresh = [like(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        result: torch.Tensor = target(*fresh)
    return result


def _is_sum(node: Node) -> bool:
    """The sum of two tensors of its shape and dtype: of the uses of a parameter."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    like = node.meta["val"]
    return all(_value(a).shape == like.shape and _value(a).dtype == like.dtype for a in node.all_input_nodes)


def _rows_of(place: GradientPlace, stack: Node) -> Iterator[tuple[Node, GradientPlace]]:
    """Every piece of a gradient along its first dimension, with the rows of the buffer that it belongs to."""
    start, pieces = 0, stack.args[0]
    for piece in cast(Sequence[Node], pieces):
        stop = start + piece.meta["val"].shape[0]
        seen = place.through((aten.slice.Tensor, (0, start, stop)))
        assert seen is not None  # rows of any strides can be sliced
        yield piece, seen
        start = stop


def _shape_before(node: Node) -> View:
    return aten.view.default, (list(node.all_input_nodes[0].meta["val"].shape),)


def _unpermuted(node: Node) -> View:
    order: Any = node.args[1]
    return aten.permute.default, (sorted(range(len(order)), key=lambda i: order[i] % len(order)),)


_TRANSPOSE: View = (aten.t.default, ())
# The view to take of a buffer for the view that its gradient goes through.
_INVERSES: Mapping[Any, Callable[[Node], View]] = {
    aten.t.default: lambda node: _TRANSPOSE,
    aten.transpose.int: lambda node: (aten.transpose.int, node.args[1:]),
    aten.permute.default: _unpermuted,
    aten.view.default: _shape_before,
    UNSAFE_VIEW: _shape_before,
    aten.unsqueeze.default: _shape_before,
    aten.squeeze.dim: _shape_before,
    aten.squeeze.dims: _shape_before,
}
_PRODUCTS: Mapping[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}
