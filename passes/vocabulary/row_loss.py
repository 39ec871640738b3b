"""The loss of a step as a function of a few statistics of each row of logits, and its gradient.

The operations of the loss, and of its backward, are evaluated with row statistics in place of the
logits. A gradient with one column per word then is a sum of three terms, each with one factor per
row: the softmax, one at the label, and one at every word. Vocabulary shards compute the terms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import is_random, operator_name
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.vocabulary.output_layer import (
    CASTS,
    COPIES,
    LABEL_LOGIT,
    LOG_SUM_EXP,
    LOGIT_SUM,
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


class Factors(NamedTuple):
    """A value with one column per word, as three factors per row.

    It is `softmax` times the probabilities, plus `label` at the label, plus `words` at every word.
    `undone` counts the elementwise operations between logits and product through which a gradient
    has already passed.
    """

    softmax: Tensor
    label: Tensor
    words: Tensor
    undone: int = 0

    def map(self, function: Callable[..., Tensor], *further: "Factors") -> "Factors":
        rows = map(function, self[:3], *(factors[:3] for factors in further))
        return Factors(*rows, self.undone)  # type: ignore[call-arg, arg-type]


class RowLoss:
    """The loss, and outputs, behind the output layers of a step; several layers share one weight.

    Attributes:
        gradients: The gradient of each layer's product; empty for a forward alone.
        trained: Values that depend on parameters, and no logits.
        derived: Values that depend on the logits.
        linear: Linear operations at the end of the loss, the last one first. Their sums may have
            operands in `trained`: losses of the layers before.
        form: The elementwise operations between product and softmax.
    """

    def __init__(
        self, step: StepGraph, layers: Sequence[OutputLayer], gradients: Sequence[Node]
    ) -> None:
        self.step, self.layers, self.gradients = step, list(layers), gradients
        self.layer_of = {node: layer for layer in layers for node in layer.logits}
        self.counts = [shape_of(layer.product)[0] for layer in layers]
        self.rows, self.words = sum(self.counts), shape_of(layers[0].product)[1]
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
        statistics = [item for layer in layers for item in layer.statistics.items()]
        self.form = statistics[0][1][1].elementwise
        self.has_total = any(LOGIT_SUM in names for _, (names, _) in statistics)
        for node, (_, logits) in statistics:
            if list(map(_operation, logits.elementwise)) != list(map(_operation, self.form)):
                refuse(node, "a loss that reads logits before and after a scale, cap or cast")
        for layer in layers:
            labels = {_label_order(layer, node) for node in layer.labels}
            if len(labels) > 1:
                refuse(next(iter(layer.labels)), "terms of the loss with different labels")
        self._check_on_fake_tensors()

    def at(self, values: Values, statistics: Statistics | None = None) -> "Evaluation":
        """Returns the loss of one microbatch. `values` are of placeholders."""
        return Evaluation(self, values, statistics)

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
            self.at(values, statistics).labels()
            self.at(values, statistics).results()


class Evaluation:
    """Evaluates nodes of a step with row statistics in place of logits."""

    def __init__(self, loss: RowLoss, values: Values, statistics: Statistics | None) -> None:
        self.row_loss, self.statistics = loss, statistics
        self.known: dict[Node, Any] = dict(values)
        self.split: Sequence[Node] = ()

    def labels(self) -> Tensor:
        """Returns the label of every row; `NO_LABEL` for rows without one."""
        return torch.cat([self._labels_of(layer) for layer in self.row_loss.layers])

    def results(self) -> tuple[dict[int, Tensor], Tensor | None, Factors | None]:
        """Returns outputs that depend on the logits, by number, the loss, and the gradient of the
        products, [rows] each. The loss is without losses of the layers before."""
        loss = self.row_loss
        outputs = enumerate(loss.step.outputs)
        outputs_by_index = {i: self.value(node) for i, node in outputs if node in loss.derived}
        if not loss.gradients:
            return outputs_by_index, None, None
        self.split = loss.linear
        first, *further = map(self._product_gradient, loss.gradients)
        joined = first.map(lambda *rows: torch.cat(rows), *further)
        return outputs_by_index, self.value(loss.step.loss), joined

    def value(self, node: Any) -> Any:
        """Returns a value without a column per word."""
        if node not in self.known:
            self.known[node] = self._compute(node)
        return self.known[node]

    def _compute(self, node: Node) -> Any:
        loss = self.row_loss
        if any(node in layer.statistics for layer in loss.layers):
            return self._statistic(node)
        if node in loss.layer_of:
            refuse(node, f"{operator_name(node)} of the logits in the backward")
        if node in loss.trained:
            refuse(node, f"a loss that also reads {node.name}, which depends on parameters")
        if node.op == "get_attr":
            return getattr(loss.step.module, str(node.target))
        if node in self.split and loss.trained.intersection(node.all_input_nodes):
            [source] = [source for source in node.all_input_nodes if source not in loss.trained]
            return self.value(source).to(node.meta["val"].dtype)
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _rows_of(self, logits: Any, rows: Tensor) -> Tensor:
        """Returns rows of all logits in the order and shape of the rows of some logits."""
        layer = self.row_loss.layer_of[logits]
        rows = rows.split(self.row_loss.counts)[self.row_loss.layers.index(layer)]
        return _select_rows(layer.logits[logits], rows)

    def _statistic(self, node: Node) -> Any:
        """Returns what an operation of the loss computes of the statistics."""
        source: Any = node.args[0]
        layer, value = self.row_loss.layer_of[source], node.meta["val"]
        (name, *_), logits = layer.statistics[node]
        maximum, log_sum, *further = (self._rows_of(source, rows) for rows in self.statistics or ())
        result = dict(zip((LABEL_LOGIT, LOGIT_SUM), further, strict=True)).get(name, log_sum)
        count = self.row_loss.words if name == LOGIT_SUM else 1
        result = result + count * (-log_sum if logits.normalized else maximum)
        if name == LABEL_LOGIT:
            label = self.value(layer.labels[node])
            is_word = (label >= 0) & (label < self.row_loss.words)
            result = torch.where(
                is_word.reshape(result.shape), result, math.nan
            )  # eager mode raises
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
            numbers = self.value(label).long().reshape(shape_of(source)[:-1])
            return _spread_rows(layer.logits[source], numbers).reshape(count)
        device = layer.hidden.meta["val"].device
        return torch.full((count,), NO_LABEL, dtype=torch.int64, device=device)

    def _product_gradient(self, node: Node) -> Factors:
        factors = self._gradient(node)
        if factors.undone != len(self.row_loss.form):
            refuse(node, "a gradient of the logits that bypasses a scale or cap")
        return factors.map(lambda rows: rows.expand(shape_of(node)[:1]))

    def _gradient(self, node: Any) -> Factors:
        """Returns a value of the backward with one column per word."""
        rule = _RULES.get(operator_name(node)) or self._refuse(node)
        return rule(self, node, *node.args)

    def _refuse(self, node: Node) -> NoReturn:
        refuse(node, f"{operator_name(node)} in the gradient of the logits")

    def _require(self, node: Node, condition: bool) -> None:
        if not condition:
            self._refuse(node)

    def _is_wide(self, value: Any) -> bool:
        return isinstance(value, Node) and shape_of(value)[-1:] == (self.row_loss.words,)

    def _factors(self, place: int, rows: Tensor) -> Factors:
        """Returns factors with one that is not zero, in the dtype of the statistics."""
        assert self.statistics is not None
        rows = rows.to(self.statistics.maximum.dtype)
        factors = [torch.zeros_like(rows)] * 3
        factors[place] = rows
        return Factors(*factors)  # type: ignore[arg-type]

    def _view(self, node: Node, source: Node, *_: Any) -> Factors:
        self._require(node, self._is_wide(node) and self._is_wide(source))
        return self._gradient(source).map(lambda rows: rows.reshape(shape_of(node)[:-1]))

    def _unslice(self, node: Any, source: Node, sizes: Any, dim: int, *at: Any) -> Factors:
        """The backward of a slice of rows."""
        dim %= len(sizes)
        self._require(node, dim < len(sizes) - 1)
        return self._gradient(source).map(lambda rows: node.target(rows, sizes[:-1], dim, *at))

    def _add(self, node: Node, first: Node, second: Node) -> Factors:
        one, second_factors = self._gradient(first), self._gradient(second)
        self._require(node, not node.kwargs and one.undone == second_factors.undone)
        return one.map(torch.add, second_factors)

    def _scale(self, node: Any, first: Any, second: Any) -> Factors:
        wide, factor = (first, second) if self._is_wide(first) else (second, first)
        if isinstance(factor, Node):
            divided_by = operator_name(node) == "div" and wide is second
            self._require(node, shape_of(factor)[-1:] in ((), (1,)) and not divided_by)
            factor = self.value(factor).reshape(shape_of(factor)[:-1])
        elif (undone := self._undone(node, wide)) is not None:
            return undone
        return self._gradient(wide).map(lambda rows: node.target(rows, factor))

    def _negate(self, node: Node, source: Node) -> Factors:
        return self._gradient(source).map(torch.neg)

    def _undo(self, node: Node, source: Node, *_: Any) -> Factors:
        return self._undone(node, source) or self._refuse(node)

    def _undone(self, node: Node, source: Node) -> Factors | None:
        """Takes a gradient through the next operation of the form; None if `node` is another."""
        factors, form = self._gradient(source), self.row_loss.form
        forward = form[-1 - factors.undone] if factors.undone < len(form) else node.args[0]
        same = operator_name(node).removesuffix("_backward") == operator_name(forward)  # type: ignore
        if operator_name(node) in ("mul", "div"):
            same = same and node.args[1:] == forward.args[1:]  # type: ignore[union-attr]
        return factors._replace(undone=factors.undone + 1) if same else None

    def _unsoftmax(self, node: Node, source: Node, logits: Node, *_: Any) -> Factors:
        """The gradient minus the probabilities times its sum over the words."""
        self._require(node, without(logits, COPIES) in self.row_loss.layer_of)
        factors = self._gradient(source)
        return factors._replace(softmax=-(factors.label + self.row_loss.words * factors.words))

    def _unpick(self, node: Node, tangent: Node, logits: Node, *args: Any) -> Factors:
        """The backward of nll_loss."""
        label, weight, reduction, ignored, count = args
        self._require(node, weight is None)
        assert self.statistics is not None
        factor = -self.value(tangent).to(self.statistics.maximum.dtype)
        factor = factor / self.value(count) if reduction == 1 else factor
        return self._at_label(node, label, torch.where(self.value(label) != ignored, factor, 0.0))

    def _ungather(self, node: Node, zeros: Node, _: int, label: Node, source: Node) -> Factors:
        self._require(node, shape_of(label)[-1] == 1 and operator_name(zeros) == "new_zeros")
        return self._at_label(node, label, self.value(source).squeeze(-1))

    def _at_label(self, node: Node, label: Node, rows: Tensor) -> Factors:
        labels = [
            node_label for layer in self.row_loss.layers for node_label in layer.labels.values()
        ]
        label_nodes = [without(node_label, _RESHAPES) for node_label in labels]
        self._require(node, without(label, _RESHAPES) in label_nodes)
        return self._factors(1, rows)

    def _unsum(self, node: Node, source: Node, *_: Any) -> Factors:
        """The backward of a sum over the words."""
        rows = self.value(source)
        self._require(node, rows.shape[-1:] in ((), (1,)))
        return self._factors(2, rows.reshape(rows.shape[:-1]).expand(shape_of(node)[:-1]))

    def _probabilities(self, node: Node, shifted: Any) -> Factors:
        """The exp(logits - logsumexp(logits)) in the backward of logsumexp."""
        self._require(node, operator_name(shifted) == "sub" and not shifted.kwargs)
        logits, statistic = (without(arg, _RESHAPES) for arg in shifted.args)
        layer = self.row_loss.layer_of.get(logits)
        self._require(node, layer is not None and statistic in layer.statistics)
        (name, *_), form = layer.statistics[statistic]  # type: ignore[union-attr]
        of_these = without(statistic.args[0], _RESHAPES) is logits
        self._require(node, name == LOG_SUM_EXP and of_these and not form.normalized)
        rows = self._rows_of(without(shifted.args[0], COPIES), self.statistics[0])  # type: ignore
        return self._factors(0, torch.ones_like(rows))


_RULES: Mapping[str, Callable[..., Factors]] = {
    **dict.fromkeys(COPIES | VIEWS, Evaluation._view),
    **dict.fromkeys(("slice_backward", "select_backward"), Evaluation._unslice),
    **dict.fromkeys(("mul", "div"), Evaluation._scale),
    **dict.fromkeys(("tanh_backward", *CASTS), Evaluation._undo),
    "add": Evaluation._add,
    "neg": Evaluation._negate,
    "_log_softmax_backward_data": Evaluation._unsoftmax,
    "nll_loss_backward": Evaluation._unpick,
    "scatter_add": Evaluation._ungather,
    "expand": Evaluation._unsum,
    "exp": Evaluation._probabilities,
}


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
