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

from zbcompile.passes.exported.step_graph import StepGraph, is_random, operator_name
from zbcompile.passes.exported.vocabulary.output_layer import (
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

    def map(self, function: Callable[..., Tensor], *others: "Factors") -> "Factors":
        rows = (function(*tensors) for tensors in zip(self[:3], *(o[:3] for o in others)))  # noqa: B905
        return Factors(*rows, self.undone)  # type: ignore[arg-type]


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
        self.step, self.layers, self.gradients = step, layers, gradients
        self.layer_of = {node: layer for layer in layers for node in layer.logits}
        self.words = shape_of(layers[0].product)[-1]
        self.rows = sum(shape_of(layer.product)[0] for layer in layers)
        self.derived: set[Node] = {layer.product for layer in layers}
        self.trained: set[Node] = set()
        changing = {node for name, node in step.buffers.items() if name in step.buffer_updates}
        sources_of_trained = {*step.parameters.values(), *changing}
        for node in step.calls():
            sources = set(node.all_input_nodes)
            if sources & self.derived:
                self.derived.add(node)
            elif node not in self.derived and (is_random(node) or sources & sources_of_trained):
                self.trained.add(node)
                sources_of_trained.add(node)
        self.linear: list[Node] = []
        if step.loss is not None:
            self._find_linear_end(step.loss, step.backward_nodes())
        statistics = [item for layer in layers for item in layer.statistics.items()]
        self.form = statistics[0][1][1].elementwise
        self.has_total = any(LOGIT_SUM in names for _, (names, _) in statistics)
        for node, (_, logits) in statistics:
            if list(map(_operation, logits.elementwise)) != list(map(_operation, self.form)):
                refuse(node, "a loss that reads logits before and after a scale, cap or cast")
        self._check_labels()
        self._check_on_fake_tensors()

    def labels(self, values: Values) -> Tensor:
        """Returns the label of every row; `NO_LABEL` for rows without one."""
        evaluation = _Evaluation(self, values)
        return torch.cat([evaluation.labels_of(layer) for layer in self.layers])

    def outputs(self, statistics: Statistics, values: Values) -> dict[int, Tensor]:
        """Returns the outputs of the step that depend on the logits, by number."""
        evaluation = _Evaluation(self, values, statistics)
        outputs = enumerate(self.step.outputs)
        return {i: evaluation.value(node) for i, node in outputs if node in self.derived}

    def loss(self, statistics: Statistics, values: Values) -> tuple[Tensor, Factors]:
        """Returns the loss without losses of the layers before, and the products' gradients."""
        evaluation = _Evaluation(self, values, statistics, split=self.linear)
        first, *others = [evaluation.product_gradient(node) for node in self.gradients]
        return evaluation.value(self.step.loss), first.map(lambda *rows: torch.cat(rows), *others)

    def data(self, node: Any, values: Values) -> Tensor:
        """Returns a value that depends on the batch alone."""
        value: Tensor = _Evaluation(self, values).value(node)
        return value

    def with_trunk_loss(self) -> set[Node]:
        """Returns the values that contain a loss of the layers before."""
        found = set(self.trained)
        for node in reversed(self.linear):
            if found.intersection(node.all_input_nodes):
                found.add(node)
        return found

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

    def _check_labels(self) -> None:
        for layer in self.layers:
            found = {
                (without(label, _RESHAPES), _row_order(layer, layer.logits[node.args[0]]))  # type: ignore[index]
                for node, label in layer.labels.items()
            }
            if len(found) > 1:
                refuse(next(iter(layer.labels)), "terms of the loss with different labels")

    def _check_on_fake_tensors(self) -> None:
        """Refuses a loss that reads more than statistics."""
        step = self.step
        holders = (*step.batch_inputs.values(), *step.buffers.values(), *step.constants.values())
        values = {node: node.meta["val"] for node in (*holders, step.tangent) if node is not None}
        product = self.layers[0].product.meta["val"]
        dtype = torch.promote_types(product.dtype, torch.float32)
        with torch.no_grad():
            statistics = Statistics(*(product.new_empty(self.rows, dtype=dtype) for _ in range(4)))
            self.labels(values)
            self.outputs(statistics, values)
            if self.gradients:
                self.loss(statistics, values)


class _Evaluation:
    """Evaluates nodes of a step with row statistics in place of logits."""

    def __init__(
        self,
        loss: RowLoss,
        values: Values,
        statistics: Statistics | None = None,
        split: Sequence[Node] = (),
    ) -> None:
        self.row_loss, self.statistics, self.split = loss, statistics, split
        self.known: dict[Node, Any] = dict(values)
        self.gradients: dict[Node, Factors] = {}

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
        if node in loss.trained or node in loss.step.parameters.values():
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
        layer, layers = self.row_loss.layer_of[logits], list(self.row_loss.layers)
        counts = [shape_of(each.product)[0] for each in layers]
        rows = rows.split(counts)[layers.index(layer)]
        for operation in layer.logits[logits].rows:
            rows = _select_rows(operation, rows)
        return rows

    def _statistic(self, node: Node) -> Any:
        """Returns what an operation of the loss computes of the statistics."""
        assert self.statistics is not None
        source, layer = node.args[0], self.row_loss.layer_of[node.args[0]]  # type: ignore[index]
        (name, *_), logits = layer.statistics[node]
        maximum, log_sum, label, total = (self._rows_of(source, v) for v in self.statistics)
        found = {LABEL_LOGIT: label, LOG_SUM_EXP: log_sum, LOGIT_SUM: total}[name]
        count = self.row_loss.words if name == LOGIT_SUM else 1
        found = found + count * (-log_sum if logits.normalized else maximum)
        if name == LABEL_LOGIT:
            numbers = self.value(layer.labels[node]).reshape(found.shape)
            is_word = (numbers >= 0) & (numbers < self.row_loss.words)
            found = torch.where(is_word, found, math.nan)  # eager mode raises an error
        value = node.meta["val"]
        if operator_name(node) != "nll_loss_forward":
            return found.reshape(value.shape).to(value.dtype)
        _, label, _, reduction, ignored = map_arg(node.args, lambda arg: arg)
        kept = self.value(label) != ignored
        losses, weight = torch.where(kept, -found, 0.0), kept.sum().to(found.dtype)
        if reduction:
            losses = losses.sum() / (weight if reduction == 1 else 1)
        return losses.to(value[0].dtype), weight.to(value[1].dtype)

    def labels_of(self, layer: OutputLayer) -> Tensor:
        """Returns the label of every row of a product."""
        count, device = shape_of(layer.product)[0], layer.hidden.meta["val"].device
        if not layer.labels:
            return torch.full((count,), NO_LABEL, dtype=torch.int64, device=device)
        node, label = next(iter(layer.labels.items()))
        source: Any = node.args[0]
        numbers = self.value(label).long().reshape(shape_of(source)[:-1])
        for operation in reversed(layer.logits[source].rows):
            numbers = _spread_rows(operation, numbers)
        return numbers.reshape(count)  # type: ignore[no-any-return]

    def product_gradient(self, node: Node) -> Factors:
        """Returns the gradient of a product, [rows] each."""
        factors = self.gradient(node)
        if factors.undone != len(self.row_loss.form):
            refuse(node, "a gradient of the logits that bypasses a scale or cap")
        return factors.map(lambda rows: rows.expand(shape_of(node)[:-1]))

    def gradient(self, node: Any) -> Factors:
        """Returns a value of the backward with one column per word."""
        if node not in self.gradients:
            rule = _RULES.get(operator_name(node)) or self._refuse(node)
            self.gradients[node] = rule(self, node, *node.args)
        return self.gradients[node]

    def _refuse(self, node: Node) -> NoReturn:
        refuse(node, f"{operator_name(node)} in the gradient of the logits")

    def _require(self, node: Node, condition: bool) -> None:
        if not condition:
            self._refuse(node)

    def _is_wide(self, value: Any) -> bool:
        return isinstance(value, Node) and shape_of(value)[-1:] == (self.row_loss.words,)

    def _copy(self, node: Node, source: Node, *_: Any) -> Factors:
        return self.gradient(source)

    def _view(self, node: Node, source: Node, *_: Any) -> Factors:
        self._require(node, self._is_wide(node) and self._is_wide(source))
        return self.gradient(source).map(lambda rows: rows.reshape(shape_of(node)[:-1]))

    def _unslice(self, node: Any, source: Node, sizes: list[int], dim: int, *at: Any) -> Factors:
        """The backward of a slice of rows."""
        *rows_shape, _ = sizes
        self._require(node, dim % len(sizes) < len(rows_shape))
        return self.gradient(source).map(
            lambda rows: node.target(rows, rows_shape, dim % len(sizes), *at)
        )

    def _add(self, node: Node, first: Node, second: Node) -> Factors:
        one, other = self.gradient(first), self.gradient(second)
        self._require(node, not node.kwargs and one.undone == other.undone)
        return one.map(torch.add, other)

    def _scale(self, node: Any, first: Any, second: Any) -> Factors:
        wide, factor = (first, second) if self._is_wide(first) else (second, first)
        if not isinstance(factor, Node):
            undone = self._undone(node, wide)
            if undone is not None:
                return undone
        else:
            divided_by = operator_name(node) == "div" and wide is second
            self._require(node, shape_of(factor)[-1:] in ((), (1,)) and not divided_by)
            factor = self.value(factor)
            factor = factor.squeeze(-1) if factor.ndim else factor
        return self.gradient(wide).map(lambda rows: node.target(rows, factor))

    def _negate(self, node: Node, source: Node) -> Factors:
        return self.gradient(source).map(torch.neg)

    def _undo(self, node: Node, source: Node, *_: Any) -> Factors:
        return self._undone(node, source) or self._refuse(node)

    def _undone(self, node: Node, source: Node) -> Factors | None:
        """Takes a gradient through the next operation of the form; None if `node` is another."""
        factors, form = self.gradient(source), self.row_loss.form
        if factors.undone == len(form):
            return None
        forward = form[-1 - factors.undone]
        same = operator_name(node).removesuffix("_backward") == operator_name(forward)
        if operator_name(forward) in ("mul", "div"):
            same = same and node.args[1:] == forward.args[1:]
        return factors._replace(undone=factors.undone + 1) if same else None

    def _unsoftmax(self, node: Node, source: Node, logits: Node, *_: Any) -> Factors:
        """The gradient minus the probabilities times its sum over the words."""
        _, label, words, undone = self.gradient(source)
        self._require(node, without(logits, COPIES) in self.row_loss.layer_of)
        return Factors(-(label + self.row_loss.words * words), label, words, undone)

    def _unpick(self, node: Node, tangent: Node, logits: Node, *args: Any) -> Factors:
        """The backward of nll_loss."""
        label, weight, reduction, ignored, count = args
        self._require(node, weight is None)
        factor = -self.value(tangent) / (self.value(count) if reduction == 1 else 1)
        rows = torch.where(self.value(label) != ignored, factor, 0.0)
        return self._at_label(node, label, rows)

    def _ungather(self, node: Node, zeros: Node, _: int, label: Node, source: Node) -> Factors:
        is_column = shape_of(label)[-1] == 1
        self._require(node, is_column and operator_name(zeros) in ("new_zeros", "zeros"))
        return self._at_label(node, label, self.value(source).squeeze(-1))

    def _at_label(self, node: Node, label: Node, rows: Tensor) -> Factors:
        labels = [known for layer in self.row_loss.layers for known in layer.labels.values()]
        known = {without(each, _RESHAPES) for each in labels}
        self._require(node, without(label, _RESHAPES) in known)
        zeros = torch.zeros_like(rows)
        return Factors(zeros, rows, zeros)

    def _unsum(self, node: Node, source: Node, *_: Any) -> Factors:
        """The backward of a sum over the words."""
        rows = self.value(source)
        self._require(node, rows.ndim == 0 or rows.shape[-1] == 1)
        rows = (rows.squeeze(-1) if rows.ndim else rows).expand(shape_of(node)[:-1])
        zeros = torch.zeros_like(rows)
        return Factors(zeros, zeros, rows)

    def _probabilities(self, node: Node, shifted: Any) -> Factors:
        """The exp(logits - logsumexp(logits)) in the backward of logsumexp."""
        self._require(node, operator_name(shifted) == "sub" and not shifted.kwargs)
        logits = without(shifted.args[0], COPIES)
        statistic = without(shifted.args[1], _RESHAPES)
        layer = self.row_loss.layer_of.get(logits)
        names = layer.statistics.get(statistic, ("",))[0] if layer is not None else ""
        of_these = names == (LOG_SUM_EXP,) and without(statistic.args[0], COPIES) is logits
        self._require(node, of_these and not layer.logits[logits].normalized)  # type: ignore
        assert self.statistics is not None
        zeros = torch.zeros_like(self._rows_of(logits, self.statistics.maximum))
        return Factors(zeros + 1, zeros, zeros)


_RULES: Mapping[str, Callable[..., Factors]] = {
    **dict.fromkeys(COPIES, _Evaluation._copy),
    **dict.fromkeys(VIEWS, _Evaluation._view),
    **dict.fromkeys(("slice_backward", "select_backward"), _Evaluation._unslice),
    **dict.fromkeys(("mul", "div"), _Evaluation._scale),
    **dict.fromkeys(("tanh_backward", *CASTS), _Evaluation._undo),
    "add": _Evaluation._add,
    "neg": _Evaluation._negate,
    "_log_softmax_backward_data": _Evaluation._unsoftmax,
    "nll_loss_backward": _Evaluation._unpick,
    "scatter_add": _Evaluation._ungather,
    "expand": _Evaluation._unsum,
    "exp": _Evaluation._probabilities,
}


def _operation(node: Node) -> tuple[Any, ...]:
    return node.target, node.args[1:], dict(node.kwargs)


def _row_order(layer: OutputLayer, logits: Logits) -> tuple[int, ...]:
    """Returns the number that each row of the logits has in the product."""
    rows = torch.arange(shape_of(layer.product)[0])
    for operation in logits.rows:
        rows = _select_rows(operation, rows)
    return tuple(rows.flatten().tolist())


def _select_rows(operation: Any, rows: Tensor) -> Tensor:
    """Applies a view or slice of logits to a tensor that has one value per row."""
    if operator_name(operation) in VIEWS:
        return rows.reshape(shape_of(operation)[:-1])
    source, dim, *at = operation.args
    return operation.target(rows, dim % len(shape_of(source)), *at)  # type: ignore[no-any-return]


def _spread_rows(operation: Any, rows: Tensor) -> Tensor:
    """Returns labels in the order before a view or slice; other rows have no label."""
    source, dim, *at = operation.args
    shape = shape_of(source)[:-1]
    if operator_name(operation) in VIEWS:
        return rows.reshape(shape)
    scatter: Any = (
        aten.slice_scatter if operator_name(operation) == "slice" else aten.select_scatter
    )
    spread = scatter(rows.new_full(shape, NO_LABEL), rows, dim % len(shape_of(source)), *at)
    return spread  # type: ignore[no-any-return]
