"""The loss of a step as a function of a few statistics of each row of logits.

The operations of the loss are evaluated with row statistics in place of the logits. The gradient of
a product has three terms, each with one factor per row: the derivative by the log-sum-exp is the
factor of the softmax, that by the label's logit is added at the label, and that by the sum of
logits at every word. Vocabulary shards compute the terms.

The exported backward must be the derivative of the exported loss. It is not for a loss with a part
under `no_grad`, or with a Function or a hook: such a loss is refused.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.capture.dtensor_parameters import tangent_like
from zbcompile.passes.graph.fx import is_random, operator_name
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import make_fx
from zbcompile.passes.vocabulary.output_layer import (
    CASTS,
    COPIES,
    LABEL_LOGIT,
    LOGIT_SUM,
    UNSHARDED,
    VIEWS,
    Logits,
    OutputLayer,
    refuse,
    shape_of,
    without,
)

NO_LABEL = -1
_LINEAR = COPIES | VIEWS | CASTS | {"neg", "mul", "div"}
_RESHAPES = COPIES | VIEWS | CASTS | {"unsqueeze", "squeeze"}


class Statistics(NamedTuple):
    """Numbers per row of logits, [rows] each. All but the maximum are relative to the maximum.

    Attributes:
        log_sum: The logarithm of the sum of the exponentials.
        label: The logit of the label.
        total: The sum of the logits.
    """

    maximum: Tensor
    log_sum: Tensor
    label: Tensor
    total: Tensor


class RowLoss:
    """The loss, and outputs, behind the output layer of a step.

    Attributes:
        trained: Values that depend on parameters, and no logits.
        derived: Values that depend on the logits.
        linear: Linear operations at the end of the loss, the last one first. Their sums may have
            operands in `trained`: losses of the layers before.
        form: The elementwise operations between product and softmax.
        bias: The placeholder of the bias, or None.
    """

    def __init__(self, step: StepGraph, layer: OutputLayer) -> None:
        self.step, self.layer = step, layer
        self.counts = [shape_of(product)[0] for product in layer.products]
        self.rows, self.words = sum(self.counts), shape_of(layer.products[0])[1]
        self.has_total = LOGIT_SUM in layer.statistics.values()
        self.derived = set(layer.products)
        self.trained = {*step.parameters.values(), *step.updated_buffers}
        for node in step.calls():
            sources = set(node.all_input_nodes)
            if sources & self.derived:
                self.derived.add(node)
            elif node not in self.derived and (is_random(node) or sources & self.trained):
                self.trained.add(node)
        self.linear: list[Node] = []
        backward = step.backward_nodes()
        for node in reversed(step.forward_nodes()):
            users = node.users.keys() - backward.keys()
            ends = node is step.loss or (users and users <= set(self.linear))
            if ends and node in self.derived and self._is_linear(node):
                self.linear.append(node)
        self._check_reads()
        self._check_statistics()

    def with_trunk_loss(self) -> set[Node]:
        """Returns the values that contain a loss of the layers before."""
        dependent = set(self.trained)
        for node in reversed(self.linear):
            if dependent.intersection(node.all_input_nodes):
                dependent.add(node)
        return dependent

    def _is_linear(self, node: Node) -> bool:
        sources = node.all_input_nodes
        if operator_name(node) == "add":
            return len({shape_of(source) for source in (node, *sources)}) == 1 and not node.kwargs
        derived = self.derived.intersection(sources)
        is_alone = derived == {node.args[0]} and self.trained.isdisjoint(sources)
        return operator_name(node) in _LINEAR and is_alone

    def _check_reads(self) -> None:
        """Refuses a loss that reads more than statistics and the batch."""
        layer, trunk = self.layer, self.with_trunk_loss()
        inner = self.derived.difference(layer.logits, self.linear)
        for node in self.step.forward_nodes():
            if node in inner:
                if is_random(node):  # every rank would draw numbers of its own
                    refuse(node, "a loss that draws random numbers", UNSHARDED)
                for source in trunk.intersection(node.all_input_nodes):
                    refuse(node, f"a loss that also reads {source}, which depends on parameters")

    def _check_statistics(self) -> None:
        """Refuses logits in several forms, and rows with several labels."""
        layer = self.layer
        sources = {node: layer.logits_of(node) for node in layer.statistics}
        first = next(iter(sources.values()))
        self.form, self.bias = first.elementwise, first.bias
        orders: dict[Node, tuple[Any, ...]] = {}
        for node, source in sources.items():
            if source.bias is not first.bias or _operations(source) != _operations(first):
                refuse(node, "a loss that reads logits before and after a bias, scale, cap or cast")
            if node in layer.labels:
                rows = self.rows_of(node, torch.arange(self.rows)).flatten().tolist()
                order = (without(layer.labels[node], _RESHAPES), *rows)
                if orders.setdefault(source.product, order) != order:
                    refuse(node, "terms of the loss with different labels")

    def rows_of(self, node: Node, rows: Tensor) -> Tensor:
        """Returns rows of all products in order and shape of the logits that `node` reads."""
        logits = self.layer.logits_of(node)
        rows = rows.split(self.counts)[self.layer.products.index(logits.product)]
        for operation in logits.rows:
            source, *place = operation.args
            if operator_name(operation) in VIEWS:
                rows = rows.reshape(shape_of(operation)[:-1])
            else:
                dim = place[0] % len(shape_of(source))  # type: ignore[operator]
                rows = operation.target(rows, dim, *place[1:])  # type: ignore[operator]
        return rows

    def check_gradients(self, gradients: Sequence[Node]) -> None:
        """Refuses a loss whose backward, which ends in gradients of the products, is not its
        derivative."""
        products: list[Any] = self.layer.products
        forward = [x for x in self.step.forward_nodes() if x in self.derived.difference(products)]
        read = dict.fromkeys(source for node in forward for source in node.all_input_nodes)
        outer = [node for node in read if node not in self.derived]
        inputs = [*products, self.step.tangent, *outer]

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            leaves = [tensor.detach().requires_grad_() for tensor in tensors[: len(products)]]
            values = dict(zip(inputs, [*leaves, *tensors[len(leaves) :]], strict=True))
            evaluation = Evaluation(self, values)
            _, derivatives = evaluation.gradients(leaves)
            return [*derivatives, *map(evaluation.value, gradients)]

        traced = make_fx(run)(*(node.meta["val"] for node in inputs)).graph
        numbers = _numbers_of(traced.output_node().args[0])
        if numbers[: len(products)] != numbers[len(products) :] and self.step.loss is not None:
            reason = "a loss with a hook, an autograd.Function, or parts without gradients"
            refuse(self.step.loss, reason, UNSHARDED)


class Evaluation:
    """Evaluates nodes of a step from `values`: of placeholders, for one microbatch.

    The logits are in `values`, or `statistics` of their rows take their place. Then losses of the
    layers before are left out of the loss.
    """

    def __init__(
        self, loss: RowLoss, values: Mapping[Any, Any], statistics: Statistics | None = None
    ) -> None:
        self.loss, self.statistics, self._values = loss, statistics, dict(values)

    def labels(self) -> Tensor:
        """Returns the label of every row; `NO_LABEL` for rows without one."""
        device = self.loss.layer.hidden[0].meta["val"].device
        rows = torch.arange(self.loss.rows, device=device)
        labels = torch.full_like(rows, NO_LABEL)
        for node, label in self.loss.layer.labels.items():
            places = self.loss.rows_of(node, rows).flatten()
            labels = labels.scatter(0, places, self.value(label).long().flatten())
        return labels

    def gradients(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the loss, and its gradients by some of the values or statistics."""
        options: Any = {"allow_unused": True, "materialize_grads": True}
        with torch.enable_grad():
            loss = self.value(self.loss.step.loss)
            tangent = tangent_like(loss, self.value(self.loss.step.tangent))
            return loss.detach(), torch.autograd.grad(loss, leaves, tangent, **options)

    def value(self, node: Any) -> Any:
        """Returns a value without a column per word."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        loss = self.loss
        if node.op == "get_attr":
            return getattr(loss.step.module, str(node.target))
        if self.statistics is not None:
            if node in loss.layer.statistics:
                return self._statistic(node, self.statistics)
            if node in loss.linear and loss.trained.intersection(node.all_input_nodes):
                [source] = loss.derived.intersection(node.all_input_nodes)
                return self.value(source).to(node.meta["val"].dtype)
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _statistic(self, node: Node, statistics: Statistics) -> Any:
        """Returns what an operation of the loss computes of the statistics."""
        layer, value, words = self.loss.layer, node.meta["val"], self.loss.words
        name, normalized = layer.statistics[node], layer.logits_of(node).normalized
        maximum, log_sum, label, total = (self.loss.rows_of(node, rows) for rows in statistics)
        result = {LABEL_LOGIT: label, LOGIT_SUM: total}.get(name, log_sum)
        shift = -log_sum if normalized else maximum
        result = result + (words if name == LOGIT_SUM else 1) * shift
        if name == LABEL_LOGIT:
            word = self.value(layer.labels[node])
            is_word = ((word >= 0) & (word < words)).reshape(result.shape)
            result = torch.where(is_word, result, math.nan)  # eager mode raises
        if operator_name(node) != "nll_loss_forward":
            return result.reshape(value.shape).to(value.dtype)
        *_, reduction, ignored = node.args
        words_of_one = torch.where(word == ignored, NO_LABEL, 0)
        inputs = result.unsqueeze(-1), words_of_one, None, reduction, NO_LABEL
        results = node.target(*inputs)  # type: ignore[operator]
        return [one.to(like.dtype) for one, like in zip(results, value, strict=True)]


def _numbers_of(nodes: Any) -> list[str]:
    """Returns a number for each node. Values computed by the same operations have the same one."""
    numbers: dict[str, str] = {}
    memo: dict[Node, str] = {}

    def number(node: Node) -> str:
        node = without(node, COPIES)
        if node not in memo:
            args = map_arg(node.args, number)
            name = operator_name(node).rstrip("_")  # the export removes writes in place
            args = tuple(sorted(args, key=str)) if name == "add" else args
            key = repr((name, args, map_arg(node.kwargs, number)))
            memo[node] = numbers.setdefault(key, f"%{len(numbers)}")
        return memo[node]

    return [number(node) for node in nodes]


def _operations(logits: Logits) -> list[Any]:
    return [(node.target, node.args[1:], node.kwargs) for node in logits.elementwise]
