"""Cuts the output layer and its loss off an exported step. The rest is the trunk: what the stages
of the pipeline compute.

The last stage of the trunk returns the hidden state, and its backward receives the gradient of it.
With a sharded embedding the first stage receives the rows, and its backward returns their gradient.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.exported.step_graph import (
    StepGraph,
    VocabularyValues,
    operator_name,
)
from zbcompile.passes.exported.vocabulary.output_layer import (
    CASTS,
    COPIES,
    TRANSPOSES,
    VIEWS,
    OutputLayer,
    find_output_layers,
    refuse,
    refuse_missing_layer,
    shape_of,
    without,
)
from zbcompile.passes.exported.vocabulary.row_loss import RowLoss

aten = torch.ops.aten
_LAYOUT = COPIES | VIEWS | TRANSPOSES | CASTS


@dataclass(frozen=True)
class Lookups:
    """The lookups in an embedding that is sharded by rows, and the terms of its gradient."""

    weight: str
    forward: Sequence[Node]
    backward: Sequence[Node]

    @property
    def rows(self) -> int:
        """How many rows are looked up in a microbatch."""
        return sum(node.args[1].meta["val"].numel() for node in self.forward)  # type: ignore


@dataclass(frozen=True)
class ShardedStep:
    """A step divided into the trunk and the output layer.

    Attributes:
        whole: The step with its output layer.
        trunk: The step without it, a graph of its own.
        loss: The loss as a function of the statistics of the logits.
        weight: Name of the parameter, as `bias`.
        lookups: The embedding that is sharded like the output layer, if any.
    """

    whole: StepGraph
    trunk: StepGraph
    loss: RowLoss
    weight: str
    bias: str | None
    lookups: Lookups | None

    @property
    def words(self) -> int:
        return self.loss.words

    def __str__(self) -> str:
        layer = self.loss.layers[0]
        bias = f" + {self.bias}" if self.bias else ""
        ends = ", ".join(sorted({operator_name(node) for node in layer.statistics}))
        return f"{self.weight} {list(shape_of(layer.weight))}{bias} -> {ends}"


def cut_output_layer(step: StepGraph, rows: Collection[str] | None = None) -> ShardedStep:
    """Returns a step divided into trunk and output layer. The step itself stays as it is.

    Args:
        rows: The parameters that are sharded already; None if any may be.

    Raises:
        NotShardableError: The loss, or another part of the step, needs the whole output layer.
    """
    whole, trunk = step.copy(), step.copy()
    layers = find_output_layers(whole)
    if not layers:
        refuse_missing_layer(whole)
    weight, bias = _parameters_of(whole, layers, rows)
    gradients: list[LayerGradient] = []
    if whole.tangent is not None:
        gradients = [_layer_gradient(whole, layer, weight) for layer in layers]
    loss = RowLoss(whole, layers, [gradient.logits for gradient in gradients])
    loss.check()
    lookups = _find_lookups(loss, weight, rows)
    _check_terms(whole, weight, bias, gradients, lookups)
    surgery = _Surgery(whole, trunk)
    surgery.end_with_hidden(layers, gradients)
    if lookups is not None:
        surgery.begin_with_rows(lookups)
    surgery.reduce_results(loss)
    surgery.remove_parameters({weight, bias, lookups.weight if lookups else None})
    return ShardedStep(whole, trunk, loss, weight, bias, lookups)


def _parameters_of(
    step: StepGraph, layers: Sequence[OutputLayer], rows: Collection[str] | None
) -> tuple[str, str | None]:
    """Returns the names of the weight and the bias of the output layer."""
    names = {node: name for name, node in step.parameters.items()}
    first = layers[0]
    for layer in layers:
        if (layer.weight, layer.bias) != (first.weight, first.bias):
            refuse(layer.product, "several output layers with weights of their own")
    found = [names.get(node) for node in (first.weight, first.bias) if node is not None]
    for name in found:
        if name is None or (step.tangent is not None and step.gradients.get(name) is None):
            refuse(first.product, f"an output layer that is not trained ({name or 'a buffer'})")
        if name in step.shardings:
            refuse(first.product, f"an output layer whose parameter {name} is a DTensor")
        if rows is not None and name not in rows:
            refuse(first.product, f"an output layer whose parameter {name} is on one rank")
    return found[0], found[1] if len(found) > 1 else None  # type: ignore[return-value]


@dataclass(frozen=True)
class LayerGradient:
    """The gradients of one product: by its result, by the hidden state, and the weight's term."""

    logits: Node
    hidden: Node
    weight: Node


def _layer_gradient(step: StepGraph, layer: OutputLayer, weight: str) -> LayerGradient:
    """Returns the gradients of a layer: G, mm(G, W) and mm(t(G), x)."""
    hidden = without(layer.hidden, COPIES | TRANSPOSES)
    for term in _terms_of(step.gradients[weight]):
        operands = [without(arg, COPIES | TRANSPOSES) for arg in term.args[:2]]
        if operator_name(term) != "mm" or operands.count(hidden) != 1:
            continue
        [logits] = [operand for operand in operands if operand is not hidden]
        for user in logits.users:
            if operator_name(user) == "mm" and without(user.args[1], _LAYOUT) is layer.weight:
                return LayerGradient(logits, user, term)
        refuse(layer.product, "an output layer before which nothing is trained")
    refuse(layer.product, f"an unknown form of the gradient of {weight}")


def _terms_of(gradient: Node | None) -> Iterator[Node]:
    """Yields the terms of a gradient that is a sum."""
    node = without(gradient, _LAYOUT)
    if node is not None and operator_name(node) == "add" and not node.kwargs:
        for source in node.all_input_nodes:
            yield from _terms_of(source)
    elif node is not None:
        yield node


def _find_lookups(loss: RowLoss, weight: str, rows: Collection[str] | None) -> Lookups | None:
    """Returns the embedding to shard: the output layer's weight if that is an embedding as well,
    else the only one with as many rows. None if there is none."""
    step = loss.step
    tables = {
        name: [user for user in table.users if operator_name(user) == "embedding"]
        for name, table in step.parameters.items()
        if shape_of(table)[:1] == (loss.words,) and (rows is None or name in rows)
    }
    if tables[weight]:
        lookups = Lookups(weight, tables[weight], _scattered(step, weight))
        if not _can_shard(loss, lookups):
            refuse(tables[weight][0], "an embedding, tied to the output layer, that is not sharded")
        return lookups
    found = [
        Lookups(name, nodes, _scattered(step, name)) for name, nodes in tables.items() if nodes
    ]
    if len(found) != 1 or not _can_shard(loss, found[0]):
        return None
    [lookups] = found
    terms = list(_terms_of(step.gradients.get(lookups.weight)))
    readers = step.parameters[lookups.weight].users
    alone = len(readers) == len(lookups.forward) and len(terms) == len(lookups.backward)
    return lookups if alone else None


def _scattered(step: StepGraph, name: str) -> list[Node]:
    terms = _terms_of(step.gradients.get(name))
    return [term for term in terms if operator_name(term) == "embedding_dense_backward"]


def _can_shard(loss: RowLoss, lookups: Lookups) -> bool:
    """Returns True if the batch alone determines which rows are looked up, and all are trained."""
    step = loss.step
    uses = [*lookups.forward, *lookups.backward]
    by_frequency = any((node.args[3:] or [False])[0] for node in lookups.forward) or any(
        node.args[4] for node in lookups.backward
    )
    trained = sum(node.args[1].meta["val"].numel() for node in lookups.backward)  # type: ignore
    return (
        lookups.weight not in step.shardings
        and not by_frequency
        and not any(node.args[1] in loss.trained | loss.derived for node in uses)
        and (step.tangent is None or trained == lookups.rows)
    )


def _check_terms(
    step: StepGraph,
    weight: str,
    bias: str | None,
    gradients: Sequence[LayerGradient],
    lookups: Lookups | None,
) -> None:
    """Refuses terms of the parameters' gradients that no shard computes."""
    known = {gradient.weight for gradient in gradients} | set(lookups.backward if lookups else ())
    for term in _terms_of(step.gradients.get(weight)):
        if term not in known:
            refuse(term, f"another use of {weight} in the model")
    logits = {gradient.logits for gradient in gradients}
    for term in _terms_of(step.gradients.get(bias)) if bias else ():
        if operator_name(term) != "sum" or without(term.args[0], COPIES) not in logits:
            refuse(term, f"another use of {bias} in the model")


class _Surgery:
    """Changes the copy of a step into its trunk."""

    def __init__(self, whole: StepGraph, trunk: StepGraph) -> None:
        self.whole, self.trunk, self.graph = whole, trunk, trunk.graph
        self.copies = dict(zip(whole.graph.nodes, trunk.graph.nodes, strict=True))
        self.values = trunk.vocabulary_values = VocabularyValues()

    def end_with_hidden(
        self, layers: Sequence[OutputLayer], gradients: Sequence[LayerGradient]
    ) -> None:
        """Makes the rows of all layers one result of the forward, and one input of the backward."""
        hidden = [self.copies[layer.hidden] for layer in layers]
        last = max(hidden, key=list(self.graph.nodes).index)
        one = last if len(hidden) == 1 else self._insert_after(last, aten.cat.default, hidden)
        self.values.hidden = one
        if not gradients:
            return
        arriving = self.values.hidden_gradient = self._placeholder("hidden_gradient", one)
        begin = 0
        for node in (self.copies[gradient.hidden] for gradient in gradients):
            end = begin + shape_of(node)[0]
            part = arriving
            if len(gradients) > 1:
                part = self._insert_before(node, aten.slice.Tensor, arriving, 0, begin, end)
            node.replace_all_uses_with(part)
            begin = end

    def begin_with_rows(self, lookups: Lookups) -> None:
        """Makes the rows of all lookups one input of the forward, and one result of the backward.

        The backward adds up the terms in any order, so rows and gradients are paired by number.
        """
        forward = [self.copies[node] for node in lookups.forward]
        width = shape_of(forward[0])[-1]
        with torch.no_grad():
            rows = forward[0].meta["val"].new_empty((lookups.rows, width))
        arriving = self.values.lookup = self._placeholder("lookup", forward[0], rows)
        first = next(node for node in self.graph.nodes if node.op == "call_function")
        begin = 0
        for node in forward:
            end, part = begin + node.meta["val"].numel() // width, arriving
            if len(forward) > 1:
                part = self._insert_before(first, aten.slice.Tensor, part, 0, begin, end, like=node)
            part = self._insert_before(
                first, aten.view.default, part, list(shape_of(node)), like=node
            )
            node.replace_all_uses_with(part)
            begin = end
        backward = [self.copies[node] for node in lookups.backward]
        if not backward:
            return
        last = max(backward, key=list(self.graph.nodes).index)
        parts = [
            self._insert_before(last, aten.reshape.default, node.args[0], [-1, width])
            for node in backward
        ]
        one = parts[0]
        if len(parts) > 1:
            one = self._insert_before(last, aten.cat.default, parts)
        self.values.lookup_gradient = one

    def reduce_results(self, loss: RowLoss) -> None:
        """Leaves the trunk its own part of the loss and of the outputs."""
        trunk = self.trunk

        def call(node: Node, *args: Any) -> Node:
            copies = [self.copies.get(arg, arg) if isinstance(arg, Node) else arg for arg in args]
            assert trunk.loss is not None
            return self._insert_before(
                trunk.loss, node.target, *copies, like=self.copies[node], **node.kwargs
            )

        if self.whole.loss is not None:
            part = loss.loss_of_trunk(self.whole.loss, call)
            trunk.loss = self.copies.get(part, part) if part is not None else None
        for index, node in enumerate(self.whole.outputs):
            if node in loss.derived:
                trunk.outputs[index] = None

    def remove_parameters(self, names: Collection[str | None]) -> None:
        """Removes the sharded parameters, their gradients, and what only these need."""
        trunk = self.trunk
        for name in names:
            trunk.gradients.pop(name, None)  # type: ignore[arg-type]
        trunk.refresh_output()
        originals = {copy: node for node, copy in self.copies.items()}
        for node in reversed(trunk.calls()):
            if not node.users and (node not in originals or originals[node].users):
                self.graph.erase_node(node)
        for name in names:
            holder = trunk.parameters.pop(name, None)  # type: ignore[arg-type]
            if holder is None:
                continue
            for user in holder.users:
                refuse(_last_reader(user), f"another use of {name} in the model")
            self.graph.erase_node(holder)
        self.graph.lint()

    def _placeholder(self, name: str, like: Node, value: Tensor | None = None) -> Node:
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.meta = {"val": like.meta["val"] if value is None else value}
        return node

    def _insert_after(self, node: Node, target: Any, *args: Any) -> Node:
        return self._insert_before(node.next, target, *args, like=node)

    def _insert_before(
        self, place: Node, target: Any, *args: Any, like: Node | None = None, **kwargs: Any
    ) -> Node:
        """Inserts a call that belongs to the place in the model of `like`."""
        with self.graph.inserting_before(place):
            node = self.graph.call_function(target, args, kwargs)
        values = map_arg(args, lambda source: source.meta["val"])
        with torch.no_grad():
            node.meta = {**(like or place).meta, "val": target(*values, **kwargs)}
        return node


def _last_reader(node: Node) -> Node:
    """Returns the last node of a chain of views."""
    while operator_name(node) in _LAYOUT and node.users:
        node = next(iter(node.users))
    return node
