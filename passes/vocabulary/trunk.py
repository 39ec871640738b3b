"""Cuts the output layer and its loss off an exported step. The rest is the trunk: what the stages
of the pipeline compute.

The last stage of the trunk returns the hidden state, and its backward receives the gradient of it.
With a sharded embedding the first stage receives the rows, and its backward returns their gradient.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.step_graph import StepGraph, VocabularyValues
from zbcompile.passes.vocabulary.output_layer import (
    CASTS,
    COPIES,
    TRANSPOSES,
    UNSHARDED,
    VIEWS,
    find_output_layer,
    refuse,
    shape_of,
    without,
)
from zbcompile.passes.vocabulary.row_loss import RowLoss

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
        return sum(shape_of(node.args[1]).numel() for node in self.forward)


@dataclass(frozen=True)
class ShardedStep:
    """A step divided into the trunk and the output layer.

    Attributes:
        whole: The step with its output layer.
        trunk: The step without it, another graph.
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
    def parameters(self) -> list[str]:
        """The names of all parameters that are sharded."""
        names = (self.weight, self.bias, self.lookups and self.lookups.weight)
        return list(dict.fromkeys(name for name in names if name))


def cut_output_layer(step: StepGraph, rows: Collection[str] | None = None) -> ShardedStep:
    """Returns a step divided into trunk and output layer. The step itself does not change.

    Args:
        rows: The parameters that are sharded already; None if any may be.

    Raises:
        NotShardableError: The loss, or another part of the step, needs the whole output layer.
    """
    if step.loss is not None and step.outputs:
        refuse(step.loss, "results besides the loss", UNSHARDED)
    trunk = step.copy()
    loss = RowLoss(step, find_output_layer(step))
    layer = loss.layer
    weight, bias = (_parameter(loss, node, rows) for node in (layer.weight, loss.bias))
    assert weight is not None
    products = [] if step.tangent is None else layer.products
    gradients = [_gradients(step, product, weight) for product in products]
    if gradients:
        loss.check_gradients([logits for logits, _ in gradients])
    sharded = ShardedStep(step, trunk, loss, weight, bias, _find_lookups(loss, weight, rows))
    surgery = _Surgery(step, trunk)
    surgery.end_with_hidden(layer.hidden, [hidden for _, hidden in gradients])
    if sharded.lookups is not None:
        surgery.begin_with_rows(sharded.lookups)
    surgery.reduce_results(loss)
    surgery.remove_parameters(sharded.parameters)
    return sharded


def _parameter(loss: RowLoss, node: Node | None, rows: Collection[str] | None) -> str | None:
    """Returns the name of the output layer's weight or bias; None without a bias."""
    if node is None:
        return None
    step, product = loss.step, loss.layer.products[0]
    name = next((name for name, holder in step.parameters.items() if holder is node), "a buffer")
    if name not in step.parameters or (
        step.tangent is not None and step.gradients.get(name) is None
    ):
        refuse(product, f"an output layer that is not trained ({name})", UNSHARDED)
    if name in step.shardings or (rows is not None and name not in rows):
        refuse(product, f"an output layer whose {name} the ranks divide in another way", UNSHARDED)
    return name


def _gradients(step: StepGraph, product: Node, weight: str) -> tuple[Node, Node]:
    """Returns the gradient G of a product, and mm(G, W), that of the hidden state.

    mm(t(G), hidden) is a term of the gradient of the weight.
    """
    hidden = without(product.args[-2], COPIES | TRANSPOSES)
    for term in _terms_of(step.gradients[weight]):
        operands = [without(arg, COPIES | TRANSPOSES) for arg in term.args[:2]]
        if operator_name(term) == "mm" and operands.count(hidden) == 1:
            [logits] = [operand for operand in operands if operand is not hidden]
            for user in logits.users:
                parameter = without(user.args[1], _LAYOUT) if operator_name(user) == "mm" else None
                if parameter is step.parameters[weight]:
                    return logits, user
    refuse(product, "an output layer before which nothing is trained", UNSHARDED)


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
    step, tables = loss.step, {}
    for name, table in step.parameters.items():
        forward = [user for user in table.users if operator_name(user) == "embedding"]
        terms = _terms_of(step.gradients.get(name))
        backward = [node for node in terms if operator_name(node) == "embedding_dense_backward"]
        has_rows = shape_of(table)[0] == loss.words and (rows is None or name in rows)
        if forward and has_rows and (name == weight or len(forward) == len(table.users)):
            tables[name] = Lookups(name, forward, backward)
    shardable = [lookups for lookups in tables.values() if _can_shard(loss, lookups)]
    if weight in tables:
        if tables[weight] not in shardable:
            reason = "an embedding, tied to the output layer, that is not sharded"
            refuse(tables[weight].forward[0], reason, UNSHARDED)
        return tables[weight]
    return shardable[0] if len(shardable) == 1 else None


def _can_shard(loss: RowLoss, lookups: Lookups) -> bool:
    """Returns True if the batch alone determines which rows are looked up, and all are trained."""
    uses = [*lookups.forward, *lookups.backward]
    return (
        lookups.weight not in loss.step.shardings
        and not any(node.args[3:4] == (True,) for node in lookups.forward)  # scale_grad_by_freq
        and not any(node.args[1] in loss.trained | loss.derived for node in uses)
        and (loss.step.tangent is None or len(lookups.backward) == len(lookups.forward))
    )


class _Surgery:
    """Changes the copy of a step into its trunk."""

    def __init__(self, whole: StepGraph, trunk: StepGraph) -> None:
        self.whole, self.trunk, self.graph = whole, trunk, trunk.graph
        self.copies = dict(zip(whole.graph.nodes, trunk.graph.nodes, strict=True))
        self.values = trunk.vocabulary_values = VocabularyValues()

    def end_with_hidden(self, hidden: Sequence[Node], gradients: Sequence[Node]) -> None:
        """Makes the rows of all layers one result of the forward, and one input of the backward."""
        result = self._join([self.copies[node] for node in hidden])
        self.values.hidden = result
        if gradients:
            self.values.hidden_gradient = self._receive("hidden_gradient", result.meta["val"])
            parts = [self.copies[node] for node in gradients]
            self._replace(parts, self.values.hidden_gradient, parts)

    def begin_with_rows(self, lookups: Lookups) -> None:
        """Makes the rows of all lookups one input of the forward, and one result of the backward.

        The terms of the gradient may be in another order than the lookups: rows have numbers.
        """
        forward = [self.copies[node] for node in lookups.forward]
        width = shape_of(forward[0])[-1]
        rows = forward[0].meta["val"].new_empty(lookups.rows, width)
        self.values.lookup = self._receive("lookup", rows)
        first = next(node for node in self.graph.nodes if node.op == "call_function")
        self._replace(forward, self.values.lookup, [first] * len(forward))
        if lookups.backward:
            rows = [
                self._insert(node, node, aten.reshape.default, node.args[0], [-1, width])
                for node in (self.copies[term] for term in lookups.backward)
            ]
            self.values.lookup_gradient = self._join(rows)

    def reduce_results(self, loss: RowLoss) -> None:
        """Leaves the trunk its own part of the loss and of the outputs."""
        trunk, with_trunk_loss = self.trunk, loss.with_trunk_loss()
        if self.whole.loss not in with_trunk_loss:
            trunk.loss = None
        for node in loss.linear:
            parts = [self.copies[n] for n in node.all_input_nodes if n in with_trunk_loss]
            if operator_name(node) == "add" and len(parts) == 1:
                copy, dtype = self.copies[node], node.meta["val"].dtype
                part = self._insert(copy, copy, aten.to.dtype, parts[0], dtype)
                copy.replace_all_uses_with(part)
                trunk.loss = part if trunk.loss is copy else trunk.loss
        for index, output in enumerate(self.whole.outputs):
            if output in loss.derived:
                trunk.outputs[index] = None

    def remove_parameters(self, names: Collection[str]) -> None:
        """Removes the sharded parameters, their gradients, and what only these need."""
        trunk = self.trunk
        trunk.gradients = {n: node for n, node in trunk.gradients.items() if n not in names}
        trunk.refresh_output()
        trunk.remove_dead_nodes()
        for name in names:
            holder = trunk.parameters.pop(name)
            for user in holder.users:
                refuse(user, f"another use of {name} in the model", UNSHARDED)
            self.graph.erase_node(holder)
        self.graph.lint()

    def _receive(self, name: str, value: torch.Tensor) -> Node:
        """Returns a new placeholder, for a value like this one that a shard sends."""
        with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
            node = self.graph.placeholder(name)
        node.meta = {"val": value}
        return node

    def _join(self, parts: list[Node]) -> Node:
        """Returns all rows of some nodes in one, computed where the last of them is."""
        last = max(parts)
        return self._insert(last.next, last, aten.cat.default, parts) if len(parts) > 1 else last

    def _replace(self, nodes: list[Node], rows: Node, places: list[Node]) -> None:
        """Replaces nodes by the parts of `rows` that they are, computed at some places."""
        begin, width = 0, shape_of(rows)[-1]
        for node, place in zip(nodes, places, strict=True):
            end, part = begin + shape_of(node).numel() // width, rows
            if len(nodes) > 1:
                part = self._insert(place, node, aten.slice.Tensor, part, 0, begin, end)
            part = self._insert(place, node, aten.view.default, part, list(shape_of(node)))
            node.replace_all_uses_with(part)
            begin = end

    def _insert(self, place: Node, like: Node, target: Any, *args: Any) -> Node:
        """Inserts a call before a place that belongs where `like` is in the model."""
        with self.graph.inserting_before(place):
            node = self.graph.call_function(target, args)
        with torch.no_grad():
            value = target(*map_arg(args, lambda source: source.meta["val"]))
        node.meta = {**like.meta, "val": value}
        return node
