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

aten = torch.ops.aten
Values = Mapping[Node, Tensor]  # of placeholders
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
    """The loss, and outputs, behind the output layers of a step; several layers share one weight.

    Attributes:
        trained: Values that depend on parameters, and no logits.
        derived: Values that depend on the logits.
        linear: Linear operations at the end of the loss, the last one first. Their sums may have
            operands in `trained`: losses of the layers before.
        form: The elementwise operations between product and softmax.
    """

    def __init__(
        self, step: StepGraph, layers: Sequence[OutputLayer], gradients: Sequence[Node]
    ) -> None:
        """`gradients` are those of the layers' products; there are none for a forward alone."""
        self.step, self.layers = step, layers
        self.layer_of = {node: layer for layer in layers for node in layer.logits}
        self.statistics = {node: name for x in layers for node, name in x.statistics.items()}
        self.counts = [shape_of(layer.product)[0] for layer in layers]
        self.rows, self.words = sum(self.counts), shape_of(layers[0].product)[1]
        self.has_total = LOGIT_SUM in self.statistics.values()
        self.derived = {layer.product for layer in layers}
        self.trained = set(step.parameters.values())
        self.trained |= {step.buffers[name] for name in step.buffer_updates if name in step.buffers}
        for node in step.calls():
            sources = set(node.all_input_nodes)
            if sources & self.derived:
                self.derived.add(node)
            elif node not in self.derived and (is_random(node) or sources & self.trained):
                self.trained.add(node)
        self.linear: list[Node] = []
        if step.loss is not None:
            self._find_linear_end(step.loss, step.backward_nodes())
        forms = {node: self.logits_of(node).elementwise for node in self.statistics}
        self.form = next(iter(forms.values()))
        for node, form in forms.items():
            if list(map(_operation, form)) != list(map(_operation, self.form)):
                refuse(node, "a loss that reads logits before and after a scale, cap or cast")
        for layer in layers:
            if len({_label_order(layer, node) for node in layer.labels}) > 1:
                refuse(next(iter(layer.labels)), "terms of the loss with different labels")
        self._check_on_fake_tensors()
        if gradients:
            self._check_gradients(gradients)

    def logits_of(self, node: Node) -> Logits:
        """Returns the logits that an operation reads."""
        source: Any = node.args[0]
        return self.layer_of[source].logits[source]

    def with_trunk_loss(self) -> set[Node]:
        """Returns the values that contain a loss of the layers before."""
        dependent = set(self.trained)
        for node in reversed(self.linear):
            if dependent.intersection(node.all_input_nodes):
                dependent.add(node)
        return dependent

    def _find_linear_end(self, node: Node, backward: Mapping[Node, None]) -> None:
        sources = [source for source in node.all_input_nodes if source in self.derived]
        if operator_name(node) == "add":
            shapes = {shape_of(source) for source in (node, *node.all_input_nodes)}
            is_linear = len(shapes) == 1 and not node.kwargs
        else:
            is_linear = operator_name(node) in _LINEAR and sources == [node.args[0]]
            is_linear = is_linear and not self.trained.intersection(node.all_input_nodes)
        if is_linear:
            self.linear.append(node)
            for source in sources:
                if all(user is node or user in backward for user in source.users):
                    self._find_linear_end(source, backward)

    def _check_on_fake_tensors(self) -> None:
        """Refuses a loss that reads more than statistics."""
        holders = self.step.graph.find_nodes(op="placeholder")
        values = {node: node.meta["val"] for node in holders if node not in self.trained}
        product = self.layers[0].product.meta["val"]
        dtype = torch.promote_types(product.dtype, torch.float32)
        with torch.no_grad():
            statistics = Statistics(*(product.new_empty(self.rows, dtype=dtype) for _ in range(4)))
            evaluation = Evaluation(self, values, statistics)
            evaluation.labels()
            evaluation.outputs()
            if self.step.tangent is not None:
                evaluation.derivatives()

    def _check_gradients(self, gradients: Sequence[Node]) -> None:
        """Refuses a loss whose backward is not its derivative."""
        products: list[Any] = [layer.product for layer in self.layers]
        inner = [node for node in self.step.forward_nodes() if node in self.derived - {*products}]
        read = dict.fromkeys(source for node in inner for source in node.all_input_nodes)
        outer = [node for node in read if node not in self.derived]
        inputs = [*products, self.step.tangent, *outer]

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            values: dict[Any, Any] = dict(zip(inputs, tensors, strict=True))
            with torch.enable_grad():
                leaves = [values[node].detach().requires_grad_() for node in products]
                values |= zip(products, leaves, strict=True)
                for node in inner:
                    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                loss = values[self.step.loss]
                tangent = tangent_like(loss, values[self.step.tangent])
                return torch.autograd.grad(loss, leaves, tangent)

        traced = make_fx(run)(*(node.meta["val"] for node in inputs)).graph
        holders = traced.find_nodes(op="placeholder")
        names = [node.name for node in inputs]
        derivatives: Any = traced.output_node().args[0]
        numbers: dict[str, str] = {}
        derived = _numbers_of(derivatives, dict(zip(holders, names, strict=True)), numbers)
        exported = _numbers_of(gradients, dict(zip(inputs, names, strict=True)), numbers)
        if derived != exported and self.step.loss is not None:
            reason = "a loss with a hook, an autograd.Function, or parts without gradients"
            refuse(self.step.loss, reason, UNSHARDED)


class Evaluation:
    """Evaluates nodes of a step with row statistics in place of logits. `values` are of
    placeholders, for one microbatch."""

    def __init__(self, loss: RowLoss, values: Values, statistics: Statistics | None = None) -> None:
        self.loss, self.statistics, self._holders = loss, statistics, values
        self._values: dict[Node, Any] = dict(values)
        self._sums: Sequence[Node] = ()  # they may have losses of the layers before as terms

    def labels(self) -> Tensor:
        """Returns the label of every row; `NO_LABEL` for rows without one."""
        return torch.cat([self._labels_of(layer) for layer in self.loss.layers])

    def outputs(self) -> dict[int, Tensor]:
        """Returns outputs that depend on the logits, by number."""
        outputs = enumerate(self.loss.step.outputs)
        return {i: self.value(node) for i, node in outputs if node in self.loss.derived}

    def derivatives(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the loss, without losses of the layers before, and its derivatives by the
        log-sum-exp, the label's logit and the sum of the logits, [rows] each."""
        assert self.statistics is not None
        maximum, *rest = self.statistics
        with torch.enable_grad():
            leaves = [rows.detach().requires_grad_() for rows in rest]
            inner = Evaluation(self.loss, self._holders, Statistics(maximum, *leaves))
            inner._sums = self.loss.linear
            loss = inner.value(self.loss.step.loss)
            tangent = tangent_like(loss, inner.value(self.loss.step.tangent))
            options: Any = {"allow_unused": True, "materialize_grads": True}
            return loss.detach(), torch.autograd.grad(loss, leaves, tangent, **options)

    def value(self, node: Any) -> Any:
        """Returns a value without a column per word."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        loss = self.loss
        if node in loss.statistics:
            return self._statistic(node)
        if node in loss.trained:
            refuse(node, f"a loss that also reads {node.name}, which depends on parameters")
        if node.op == "get_attr":
            return getattr(loss.step.module, str(node.target))
        if node in self._sums and loss.trained.intersection(node.all_input_nodes):
            [source] = [source for source in node.all_input_nodes if source not in loss.trained]
            return self.value(source).to(node.meta["val"].dtype)
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _rows_of(self, logits: Any, rows: Tensor) -> Tensor:
        """Returns rows of all layers in the order and shape of the rows of some logits."""
        layer = self.loss.layer_of[logits]
        rows = rows.split(self.loss.counts)[self.loss.layers.index(layer)]
        return _select_rows(layer.logits[logits], rows)

    def _statistic(self, node: Node) -> Any:
        """Returns what an operation of the loss computes of the statistics."""
        source: Any = node.args[0]
        layer, value, words = self.loss.layer_of[source], node.meta["val"], self.loss.words
        name, logits = self.loss.statistics[node], layer.logits[source]
        maximum, log_sum, *further = (self._rows_of(source, rows) for rows in self.statistics or ())
        result = dict(zip((LABEL_LOGIT, LOGIT_SUM), further, strict=True)).get(name, log_sum)
        shift = -log_sum if logits.normalized else maximum
        result = result + (words if name == LOGIT_SUM else 1) * shift
        if name == LABEL_LOGIT:
            label = self.value(layer.labels[node])
            is_word = ((label >= 0) & (label < words)).reshape(result.shape)
            result = torch.where(is_word, result, math.nan)  # eager mode raises
        if operator_name(node) != "nll_loss_forward":
            return result.reshape(value.shape).to(value.dtype)
        *_, reduction, ignored = node.args
        is_counted = label != ignored
        losses, weight = torch.where(is_counted, -result, 0.0), is_counted.sum()
        if reduction:
            losses = losses.sum() / (weight if reduction == 1 else 1)
        return losses.to(value[0].dtype), weight.to(value[1].dtype)

    def _labels_of(self, layer: OutputLayer) -> Tensor:
        count = shape_of(layer.product)[0]
        for node, label in layer.labels.items():
            source: Any = node.args[0]
            labels = self.value(label).long().reshape(shape_of(source)[:-1])
            return _spread_rows(layer.logits[source], labels).reshape(count)
        device = layer.hidden.meta["val"].device
        return torch.full((count,), NO_LABEL, dtype=torch.int64, device=device)


def _numbers_of(
    nodes: Sequence[Node], leaves: Mapping[Node, str], numbers: dict[str, str]
) -> list[str]:
    """Returns a number for each value. Values computed by the same operations of `leaves`, which
    have names, have the same one. `numbers` has those of operations."""
    memo: dict[Node, str] = dict(leaves)

    def number(node: Node) -> str:
        node = node if node in memo else without(node, COPIES)
        if node not in memo:
            args = map_arg(node.args, number)
            name = operator_name(node).rstrip("_")  # the export removes writes in place
            args = sorted(args, key=str) if name == "add" else args
            key = repr((name, args, map_arg(node.kwargs, number)))
            memo[node] = numbers.setdefault(key, f"%{len(numbers)}")
        return memo[node]

    return [number(node) for node in nodes]


def _operation(node: Node) -> tuple[Any, ...]:
    return node.target, node.args[1:], dict(node.kwargs)


def _label_order(layer: OutputLayer, node: Node) -> tuple[Any, ...]:
    """Returns the labels that a node reads, and the rows of the product to which they belong."""
    source: Any = node.args[0]
    rows = _select_rows(layer.logits[source], torch.arange(shape_of(layer.product)[0]))
    return without(layer.labels[node], _RESHAPES), *rows.flatten().tolist()


def _select_rows(logits: Logits, rows: Tensor) -> Tensor:
    """Applies the views and slices of logits to a tensor that has one value per row."""
    for operation in logits.rows:
        target: Any = operation.target
        if operator_name(operation) in VIEWS:
            rows = rows.reshape(shape_of(operation)[:-1])
        else:
            rows = target(rows, *_place(operation))
    return rows


def _spread_rows(logits: Logits, rows: Tensor) -> Tensor:
    """Returns labels in the order before the views and slices; other rows have no label."""
    for operation in reversed(logits.rows):
        shape = shape_of(operation.args[0])[:-1]
        if operator_name(operation) in VIEWS:
            rows = rows.reshape(shape)
        else:
            scatter = getattr(aten, f"{operator_name(operation)}_scatter")
            rows = scatter(rows.new_full(shape, NO_LABEL), rows, *_place(operation))
    return rows


def _place(operation: Node) -> tuple[Any, ...]:
    """Returns dimension and range of a slice, the dimension counted from the first."""
    source, dim, *at = operation.args
    return dim % len(shape_of(source)), *at  # type: ignore[operator]
