"""The loss of a step as a function of a few statistics of each row of logits, and its gradient.

The operations of the loss, and of its backward, are evaluated with row statistics in place of the
logits. A gradient with one column per word then is a sum of three terms, each with one factor per
row: the softmax, one at the label, and one at every word. Vocabulary shards compute the terms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.exported.step_graph import StepGraph, is_random, operator_name
from zbcompile.passes.exported.vocabulary.output_layer import (
    COPIES,
    LABEL_LOGIT,
    LOG_SUM_EXP,
    LOGIT_SUM,
    VIEWS,
    Logits,
    OutputLayer,
    refuse,
    shape_of,
)

aten = torch.ops.aten
Values = Mapping[Node, Tensor]  # of placeholders
NO_LABEL = -1
_LINEAR = frozenset({*COPIES, *VIEWS, "_to_copy", "neg", "mul", "div"})


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
    """A value with one column per word, as three factors per row, [...] each.

    It is softmax times the probabilities, plus `label` at the label, plus `words` at every word.
    `undone` counts the elementwise operations between logits and product through which a gradient
    has already passed.
    """

    softmax: Tensor
    label: Tensor
    words: Tensor
    undone: int = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Factors":
        return Factors(*map(function, self[:3]), undone=self.undone)


@dataclass
class LossValues:
    """The results of a loss for one microbatch: outputs by number, the gradient [rows] each."""

    loss: Tensor | None
    outputs: dict[int, Tensor]
    gradient: Factors | None


@dataclass
class RowLoss:
    """The loss, and outputs, behind the output layers of a step; several layers share one weight.

    Attributes:
        logit_gradients: The gradient of each product; empty for a forward alone.
        trained: Values that depend on parameters and are no logits.
        derived: Values that depend on the logits.
        split_sums: Sums that end with an additive loss of the layers before.
    """

    step: StepGraph
    layers: Sequence[OutputLayer]
    logit_gradients: Sequence[Node]
    trained: set[Node] = field(default_factory=set)
    derived: set[Node] = field(default_factory=set)
    split_sums: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._classify_nodes()
        if self.step.loss is not None:
            self._find_additive_losses(self.step.loss, self.step.backward_nodes())
        self._check_statistics()
        self._check_outputs()

    @property
    def form(self) -> tuple[Node, ...]:
        """The elementwise operations between product and softmax."""
        return next(iter(self.layers[0].statistics.values()))[1].elementwise

    @property
    def words(self) -> int:
        return shape_of(self.layers[0].product)[-1]

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @property
    def offsets(self) -> list[int]:
        """The number of rows before each layer, and of all."""
        offsets = [0]
        for layer in self.layers:
            offsets.append(offsets[-1] + shape_of(layer.product)[0])
        return offsets

    @property
    def needs_total(self) -> bool:
        return any(
            LOGIT_SUM in names for layer in self.layers for names, _ in layer.statistics.values()
        )

    def labels(self, values: Values) -> Tensor:
        """Returns the label of every row; `NO_LABEL` for rows without one."""
        evaluation = _Evaluation(self, values)
        return torch.cat([evaluation.labels_of(layer) for layer in self.layers])

    def evaluate(self, statistics: Statistics, values: Values) -> LossValues:
        """Returns what the loss computes of the statistics of all rows."""
        evaluation = _Evaluation(self, values, statistics)
        step, loss = self.step, None
        if step.loss is not None:
            loss = evaluation.value(step.loss)
        outputs = {
            index: evaluation.value(node)
            for index, node in enumerate(step.outputs)
            if node in self.derived
        }
        if not self.logit_gradients:
            return LossValues(loss, outputs, None)
        parts = [evaluation.gradient_of_product(node) for node in self.logit_gradients]
        joined = [torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True)]
        return LossValues(loss, outputs, Factors(*joined))

    def check(self) -> None:
        """Evaluates the loss on fake tensors; refuses what depends on more than statistics."""
        step = self.step
        tables = (step.batch_inputs, step.buffers, step.constants, {"": step.tangent})
        values = {node: node.meta["val"] for t in tables for node in t.values() if node is not None}
        product = self.layers[0].product.meta["val"]
        dtype = torch.promote_types(product.dtype, torch.float32)
        with torch.no_grad():
            statistics = Statistics(*(product.new_empty(self.rows, dtype=dtype) for _ in range(4)))
            self.labels(values)
            self.evaluate(statistics, values)

    def evaluate_data(self, node: Node, values: Values) -> Tensor:
        """Returns a value that depends on the batch alone."""
        value: Tensor = _Evaluation(self, values).value(node)
        return value

    def loss_of_trunk(self, node: Node, call: Callable[..., Node]) -> Node | None:
        """Returns the part of a loss that does not depend on the logits, None if there is none.

        `call(node, *args)` inserts a node like `node` with other arguments.
        """
        if node not in self.derived:
            return node if node in self.trained else None
        if node in self.split_sums:
            parts = [self.loss_of_trunk(source, call) for source in node.all_input_nodes]
            first, *others = [part for part in parts if part is not None]
            return call(node, first, *others) if others else first
        if not self.split_sums or operator_name(node) not in _LINEAR | {"add"}:
            return None
        sources = [source for source in node.all_input_nodes if source in self.derived]
        parts = [self.loss_of_trunk(source, call) for source in sources]
        remaining = [part for part in parts if part is not None]
        if operator_name(node) == "add":
            return call(node, *remaining) if len(remaining) > 1 else next(iter(remaining), None)
        return call(node, remaining[0], *node.args[1:]) if remaining else None

    def _classify_nodes(self) -> None:
        products = {layer.product for layer in self.layers}
        parameters = set(self.step.parameters.values())
        changing = {
            self.step.buffers[name]
            for name in self.step.buffer_updates
            if name in self.step.buffers
        }
        for node in self.step.calls():
            sources = set(node.all_input_nodes)
            if node in products or sources & self.derived:
                self.derived.add(node)
            elif is_random(node) or sources & (parameters | changing | self.trained):
                self.trained.add(node)

    def _find_additive_losses(self, node: Node, backward: Mapping[Node, None]) -> None:
        """Finds the sums of a loss of the logits and one of the layers before.

        Between these sums and the loss of the step all operations are linear.
        """
        sources = [source for source in node.all_input_nodes if source in self.derived]
        trained = self.trained & set(node.all_input_nodes)
        if operator_name(node) == "add" and not node.kwargs:
            if trained and all(shape_of(s) == shape_of(node) for s in node.all_input_nodes):
                self.split_sums.add(node)
        elif operator_name(node) not in _LINEAR or trained or sources != [node.args[0]]:
            return
        for source in sources:
            if all(user is node or user in backward for user in source.users):
                self._find_additive_losses(source, backward)

    def _check_statistics(self) -> None:
        """Refuses statistics of several forms of the logits, and several labels of one row."""
        forms: set[str] = set()
        for layer in self.layers:
            labels = set()
            for node, (_, logits) in layer.statistics.items():
                forms.add(_form_text(logits))
                if len(forms) > 1:
                    refuse(node, "a loss that reads logits before and after a scale, cap or cast")
                if node in layer.labels:
                    labels.add((_origin(layer.labels[node]), _row_order(layer, logits)))
                if len(labels) > 1:
                    refuse(node, "terms of the loss with different labels")

    def _check_outputs(self) -> None:
        """Refuses outputs that read both a loss of the logits and one of the layers before."""
        after_sums: set[Node] = set(self.split_sums)
        for node in self.step.calls():
            if after_sums & set(node.all_input_nodes):
                after_sums.add(node)
        for node in self.step.outputs:
            if node in after_sums:
                refuse(
                    node, "an output that contains an auxiliary loss beside the loss of the logits"
                )


class _Evaluation:
    """Evaluates nodes of a step with row statistics in place of logits."""

    def __init__(self, loss: RowLoss, values: Values, statistics: Statistics | None = None) -> None:
        self.loss = loss
        self.known: dict[Node, Any] = dict(values)
        self.statistics = statistics
        self.gradients: dict[Node, Factors] = {}
        self.layer_of = {node: layer for layer in loss.layers for node in layer.logits}

    def value(self, node: Node) -> Any:
        """Returns a value without a column per word."""
        if node not in self.known:
            self.known[node] = self._compute(node)
        return self.known[node]

    def _compute(self, node: Node) -> Any:
        loss = self.loss
        for layer in loss.layers:
            if node in layer.statistics:
                return self._statistic(layer, node)
        if node in self.layer_of:
            refuse(node, f"{operator_name(node)} of the logits in the backward")
        if node in loss.trained or node in loss.step.parameters.values():
            refuse(node, f"a loss that also reads {node.name}, which depends on parameters")
        if node.op == "get_attr":
            return getattr(loss.step.module, str(node.target))
        assert node.op == "call_function", f"{node.name} is not known"
        if node in loss.split_sums:
            [source] = [source for source in node.all_input_nodes if source not in loss.trained]
            return self.value(source).to(node.meta["val"].dtype)
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    # Statistics in the forward

    def _row_values(self, node: Node, rows: Tensor) -> Tensor:
        """Returns rows of all logits in the order and shape of the rows of `node`."""
        layer = self.layer_of[node]
        index = list(self.loss.layers).index(layer)
        begin, end = self.loss.offsets[index : index + 2]
        rows = rows[begin:end]
        for operation in layer.logits[node].rows:
            rows = _select_rows(operation, rows)
        return rows

    def _statistic(self, layer: OutputLayer, node: Node) -> Any:
        """Returns what an operation of the loss computes of the statistics."""
        assert self.statistics is not None
        names, logits = layer.statistics[node]
        source = node.args[0]
        assert isinstance(source, Node)
        maximum, log_sum, label, total = (self._row_values(source, v) for v in self.statistics)
        found = {LABEL_LOGIT: label, LOG_SUM_EXP: log_sum, LOGIT_SUM: total}[names[0]]
        count = self.loss.words if names[0] == LOGIT_SUM else 1
        shift = -log_sum if logits.normalized else maximum
        found = found + count * shift
        if names[0] == LABEL_LOGIT:
            numbers = self.value(layer.labels[node]).reshape(found.shape)
            is_word = (numbers >= 0) & (numbers < self.loss.words)
            found = torch.where(is_word, found, math.nan)  # eager mode raises an error
        if operator_name(node) == "nll_loss_forward":
            return self._nll_loss(node, found)
        value = node.meta["val"]
        return found.reshape(value.shape).to(value.dtype)

    def _nll_loss(self, node: Node, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        _, label, _, reduction, ignored = node.args
        kept = self.value(label) != ignored  # type: ignore[arg-type]
        losses = torch.where(kept, -log_probabilities, 0.0)
        count = kept.sum().to(losses.dtype)
        if reduction:
            losses = losses.sum() / count if reduction == 1 else losses.sum()
        dtype = node.meta["val"][0].dtype
        return losses.to(dtype), count.to(dtype)

    def labels_of(self, layer: OutputLayer) -> Tensor:
        """Returns the label of every row of a product."""
        rows = shape_of(layer.product)[0]
        if not layer.labels:
            device = layer.hidden.meta["val"].device
            return torch.full((rows,), NO_LABEL, dtype=torch.int64, device=device)
        node, label = next(iter(layer.labels.items()))
        source = node.args[0]
        numbers = self.value(label).long().reshape(shape_of(source)[:-1])
        for operation in reversed(layer.logits[source].rows):
            numbers = _spread_rows(operation, numbers)
        return numbers.reshape(rows)

    # Gradients in the backward

    def gradient_of_product(self, node: Node) -> Factors:
        factors = self.gradient(node)
        if factors.undone != len(self.loss.form):
            refuse(node, "a gradient of the logits that bypasses a scale or cap")
        return factors.map(lambda rows: rows.expand(shape_of(node)[:-1]))

    def gradient(self, node: Node) -> Factors:
        """Returns a value of the backward with one column per word."""
        if node not in self.gradients:
            rule = _RULES.get(operator_name(node)) or self._refuse(node)
            self.gradients[node] = rule(self, node, *node.args)
        return self.gradients[node]

    def _refuse(self, node: Node) -> NoReturn:
        refuse(node, f"{operator_name(node)} in the gradient of the logits")

    def _is_wide(self, value: Any) -> bool:
        return isinstance(value, Node) and shape_of(value)[-1:] == (self.loss.words,)

    def _copy(self, node: Node, source: Node, *_: Any) -> Factors:
        return self.gradient(source)

    def _view(self, node: Node, source: Node, *_: Any) -> Factors:
        if not self._is_wide(node) or not self._is_wide(source):
            self._refuse(node)
        return self.gradient(source).map(lambda rows: rows.reshape(shape_of(node)[:-1]))

    def _slice_backward(
        self, node: Node, source: Node, sizes: list[int], dim: int, *rest: Any
    ) -> Factors:
        dim %= len(sizes)
        if dim == len(sizes) - 1:
            self._refuse(node)
        return self.gradient(source).map(lambda rows: node.target(rows, sizes[:-1], dim, *rest))  # type: ignore[operator]

    def _add(self, node: Node, first: Node, second: Node) -> Factors:
        one, other = self.gradient(first), self.gradient(second)
        if node.kwargs or one.undone != other.undone:
            self._refuse(node)
        terms = [a + b for a, b in zip(one[:3], other[:3], strict=True)]
        return Factors(*terms, undone=one.undone)

    def _scale(self, node: Node, first: Any, second: Any) -> Factors:
        wide, factor = (first, second) if self._is_wide(first) else (second, first)
        divides = operator_name(node) == "div"
        if divides and wide is second:
            self._refuse(node)
        if not isinstance(factor, Node):
            return self._undo(node, wide) or self._scaled(self.gradient(wide), factor, divides)
        if shape_of(factor)[-1:] not in ((), (1,)):
            self._refuse(node)
        rows = self.value(factor)
        return self._scaled(self.gradient(wide), rows.squeeze(-1) if rows.ndim else rows, divides)

    def _scaled(self, factors: Factors, by: Any, divides: bool) -> Factors:
        return factors.map(lambda rows: rows / by if divides else rows * by)

    def _negate(self, node: Node, source: Node) -> Factors:
        return self.gradient(source).map(torch.neg)

    def _undo(self, node: Node, source: Node) -> Factors | None:
        """Takes a gradient through one elementwise operation of the form, if it is the next."""
        factors, form = self.gradient(source), self.loss.form
        if factors.undone == len(form):
            return None
        forward = form[len(form) - 1 - factors.undone]
        backward_name = {"tanh": "tanh_backward"}.get(
            operator_name(forward), operator_name(forward)
        )
        numbers = [] if backward_name in ("tanh_backward", "_to_copy") else list(forward.args[1:])
        if operator_name(node) != backward_name or (numbers and numbers != list(node.args[1:])):
            return None
        return factors._replace(undone=factors.undone + 1)

    def _undo_or_refuse(self, node: Node, source: Node, *_: Any) -> Factors:
        return self._undo(node, source) or self._refuse(node)

    def _log_softmax_backward(self, node: Node, source: Node, logits: Node, *_: Any) -> Factors:
        """The gradient minus the probabilities times its sum over the words."""
        _, label, words, undone = self.gradient(source)
        if _stripped(logits) not in self.layer_of:
            self._refuse(node)
        return Factors(-(label + self.loss.words * words), label, words, undone)

    def _nll_loss_backward(self, node: Node, tangent: Node, *args: Any) -> Factors:
        log_probabilities, label, weight, reduction, ignored, count = args
        if weight is not None or _stripped(log_probabilities) not in self.layer_of:
            self._refuse(node)
        factor = -self.value(tangent)
        if reduction == 1:
            factor = factor / self.value(count)
        kept = torch.where(self.value(label) != ignored, factor, 0.0)
        return Factors(torch.zeros_like(kept), kept, torch.zeros_like(kept))

    def _scatter(self, node: Node, zeros: Node, dim: int, label: Node, source: Node) -> Factors:
        """The backward of a gather of the label's logit."""
        labels = {_origin(label) for layer in self.loss.layers for label in layer.labels.values()}
        known = operator_name(zeros) in ("new_zeros", "zeros", "zeros_like") or (
            operator_name(zeros) in ("full", "full_like", "new_full") and zeros.args[-1] == 0
        )
        if not known or _origin(label) not in labels or shape_of(label)[-1] != 1:
            self._refuse(node)
        rows = self.value(source).squeeze(-1)
        return Factors(torch.zeros_like(rows), rows, torch.zeros_like(rows))

    def _expand(self, node: Node, source: Node, *_: Any) -> Factors:
        """The backward of a sum over words."""
        rows = self.value(source)
        if rows.ndim and rows.shape[-1] != 1:
            self._refuse(node)
        rows = (rows.squeeze(-1) if rows.ndim else rows).expand(shape_of(node)[:-1])
        return Factors(torch.zeros_like(rows), torch.zeros_like(rows), rows)

    def _exp(self, node: Node, shifted: Node) -> Factors:
        """The probabilities in the backward of logsumexp: exp(logits - logsumexp(logits))."""
        if operator_name(shifted) != "sub" or shifted.kwargs:
            self._refuse(node)
        logits, subtracted = shifted.args
        assert isinstance(logits, Node)
        source, statistic = _stripped(logits), _origin(subtracted)
        layer = self.layer_of.get(source)
        if layer is None or layer.statistics.get(statistic, ((),))[0] != (LOG_SUM_EXP,):
            self._refuse(node)
        if layer.logits[source].normalized or _stripped(statistic.args[0]) != source:
            self._refuse(node)
        ones = torch.ones_like(self._row_values(source, self.statistics.maximum))  # type: ignore[union-attr]
        return Factors(ones, torch.zeros_like(ones), torch.zeros_like(ones))


_RULES: Mapping[str, Callable[..., Factors]] = {
    **dict.fromkeys(COPIES, _Evaluation._copy),
    **dict.fromkeys(VIEWS, _Evaluation._view),
    **dict.fromkeys(("slice_backward", "select_backward"), _Evaluation._slice_backward),
    **dict.fromkeys(("mul", "div"), _Evaluation._scale),
    **dict.fromkeys(("tanh_backward", "_to_copy"), _Evaluation._undo_or_refuse),
    "add": _Evaluation._add,
    "neg": _Evaluation._negate,
    "_log_softmax_backward_data": _Evaluation._log_softmax_backward,
    "nll_loss_backward": _Evaluation._nll_loss_backward,
    "scatter_add": _Evaluation._scatter,
    "expand": _Evaluation._expand,
    "exp": _Evaluation._exp,
}


def _form_text(logits: Logits) -> str:
    operations = logits.elementwise
    return "; ".join(f"{node.target}{node.args[1:]}{dict(node.kwargs)}" for node in operations)


def _stripped(node: Any) -> Any:
    """Returns the value of which a node is a copy."""
    while isinstance(node, Node) and operator_name(node) in COPIES:
        node = node.args[0]
    return node


def _origin(node: Any) -> Any:
    """Returns the value whose elements a node has, perhaps in another shape or type."""
    layout = COPIES | VIEWS | {"unsqueeze", "squeeze", "_to_copy"}
    while isinstance(node, Node) and operator_name(node) in layout:
        node = node.args[0]
    return node


def _row_order(layer: OutputLayer, logits: Logits) -> tuple[int, ...]:
    """Returns the number that each row of the logits has in the product."""
    rows = torch.arange(shape_of(layer.product)[0])
    for operation in logits.rows:
        rows = _select_rows(operation, rows)
    return tuple(rows.flatten().tolist())


def _select_rows(operation: Node, rows: Tensor) -> Tensor:
    """Applies a view or slice of logits to a tensor that has one value per row."""
    source, *arguments = operation.args
    if operator_name(operation) in VIEWS:
        return rows.reshape(shape_of(operation)[:-1])
    dim, *rest = arguments
    selected: Tensor = operation.target(rows, dim % len(shape_of(source)), *rest)  # type: ignore
    return selected


def _spread_rows(operation: Node, rows: Tensor) -> Tensor:
    """Returns labels in the order before a view or slice; other rows have no label."""
    source, *arguments = operation.args
    shape = shape_of(source)[:-1]
    if operator_name(operation) in VIEWS:
        return rows.reshape(shape)
    dim, *rest = arguments
    scatter = aten.slice_scatter if operator_name(operation) == "slice" else aten.select_scatter
    spread: Tensor = scatter(rows.new_full(shape, NO_LABEL), rows, dim % (len(shape) + 1), *rest)
    return spread
