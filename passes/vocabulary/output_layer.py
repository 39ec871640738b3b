"""Finds the output layer of a training step and the statistics of its logits that the loss reads.

Most losses of language models read the logits only through three numbers per row: the log-sum-exp,
the logit of the label and, for label smoothing, the sum of the logits. Ranks that hold shards of
the vocabulary can compute these together. Backward operations are not looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.fx import Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.graph.source_location import line_of
from zbcompile.passes.step_graph import StepGraph

aten = torch.ops.aten
LOG_SUM_EXP, LABEL_LOGIT, LOGIT_SUM = "log-sum-exp", "label's logit", "sum of logits"

COPIES = frozenset({"detach", "alias", "clone"})
VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_ROW_SLICES = frozenset({"slice", "select"})
SOFTMAXES = ("_log_softmax", "_softmax", "logsumexp")
_ELEMENTWISE = frozenset({"mul", "div", "tanh", "_to_copy"})
TRANSPOSES = frozenset({"t", "transpose", "permute", "numpy_T"})
CASTS = frozenset({"_to_copy"})  # of autocast, for one
_BEFORE_SOFTMAX = COPIES | VIEWS | _ROW_SLICES | _ELEMENTWISE | {"add"}


@dataclass(frozen=True)
class Logits:
    """A value with one column per word of the vocabulary.

    Attributes:
        elementwise: Scales, casts and the tanh of a soft cap that were applied to the product.
        rows: Views and slices of rows that were applied to the product.
        normalized: True for log-probabilities.
        has_bias: True if the bias is added.
    """

    elementwise: tuple[Node, ...] = ()
    rows: tuple[Node, ...] = ()
    normalized: bool = False
    has_bias: bool = False


@dataclass
class OutputLayer:
    """The output layer of a step.

    Attributes:
        product: The matrix product that computes the logits, with one row per token.
        hidden: The last hidden state, one row per token.
        weight: The placeholder of the weight, one row per word.
        bias: The placeholder of the bias, or None.
        logits: The nodes of the forward with one column per word.
        statistics: What each operation of the loss reads of the logits. Of log-probabilities it
            reads the log-sum-exp as well.
        labels: The labels of the operations that read a label's logit.
    """

    product: Node
    hidden: Node
    weight: Node
    bias: Node | None
    logits: dict[Node, Logits] = field(default_factory=dict)
    statistics: dict[Node, str] = field(default_factory=dict)
    labels: dict[Node, Node] = field(default_factory=dict)


class NotShardableError(CompileError):
    """The loss needs more of the logits than ranks with shards of the vocabulary exchange."""


def find_output_layers(step: StepGraph) -> list[OutputLayer]:
    """Returns the output layers of a step; several for a loss in chunks.

    These are the products with a parameter that a softmax normalizes. Of several sizes the largest
    counts, because routers of experts have a softmax as well.

    Raises:
        NotShardableError: There is none, or the loss uses the logits in another way. The message
            has the user's line.
    """
    forward = step.forward_nodes()
    products = dict.fromkeys(product for node in forward for product in _products_below(node))
    words = max((shape_of(product)[-1] for product in products), default=0)
    layers = [_output_layer(product) for product in products if shape_of(product)[-1] == words]
    if not layers:
        _refuse_missing_layer(forward)
    for layer in layers:
        _follow_logits(layer, forward, {node for _, node in step.results()})
    return layers


def _refuse_missing_layer(forward: list[Node]) -> NoReturn:
    for node in reversed(forward):
        if operator_name(node) in SOFTMAXES and node.args:
            source = _before_softmax(node)
            name = operator_name(source)
            if name in ("mm", "addmm"):
                refuse(source, "a softmax over a part of the columns of the logits", UNSHARDED)
            refuse(source, f"{name} of the logits before their softmax", UNSHARDED)
    raise NotShardableError(
        "the vocabulary cannot be sharded: no softmax normalizes the product of a hidden state and "
        "a parameter. Compute the logits by torch.nn.Linear or F.linear, with the words in the "
        "last dimension."
    )


UNSHARDED = 'Change the model there, or leave the output layer whole: vocab="off".'
_STATISTICS = (
    "A sharded loss reads only the log-sum-exp, the logit of the label and the sum of the logits "
    "of each row. Compute the rest outside of the step, or do not shard the vocabulary."
)


def _before_softmax(softmax: Node) -> Any:
    """Returns the product that a softmax normalizes, or an operation between them of another
    kind."""
    node = softmax.args[0]
    while isinstance(node, Node) and operator_name(node) in _BEFORE_SOFTMAX:
        node = node.args[0]
    return node


def _products_below(softmax: Node) -> Iterator[Node]:
    """Yields the product with a parameter whose rows a softmax over words normalizes, if any."""
    if operator_name(softmax) in SOFTMAXES:
        node = _before_softmax(softmax)
        is_product = operator_name(node) in ("mm", "addmm") and _weight_of(node) is not None
        if is_product and shape_of(node)[-1:] == shape_of(softmax.args[0])[-1:]:
            yield node


def _weight_of(product: Node) -> Node | None:
    """Returns the parameter whose transpose is the right operand of a product, or None."""
    node = product.args[-1]
    if not isinstance(node, Node) or operator_name(node) not in TRANSPOSES:
        return None
    return _placeholder(node.args[0])


def _placeholder(node: Any) -> Node | None:
    node = without(node, COPIES | CASTS)
    return node if isinstance(node, Node) and node.op == "placeholder" else None


def _output_layer(product: Node) -> OutputLayer:
    weight, hidden = _weight_of(product), product.args[-2]
    assert weight is not None
    assert isinstance(hidden, Node)
    bias = _placeholder(product.args[0]) if operator_name(product) == "addmm" else None
    if operator_name(product) == "addmm" and bias is None:
        refuse(product, "a bias that is not a parameter", UNSHARDED)
    return OutputLayer(product, hidden, weight, bias)


def _follow_logits(layer: OutputLayer, forward: list[Node], results: set[Node]) -> None:
    """Finds every operation of the forward that reads the logits."""
    logits = layer.logits
    logits[layer.product] = Logits(has_bias=layer.bias is not None)
    for node in forward:
        if node is layer.product or not any(arg in logits for arg in node.all_input_nodes):
            continue
        first = node.args[0] if node.args else None
        source = logits.get(first) if isinstance(first, Node) else None
        derived = source and (_with_bias(layer, node, source) or _derived_logits(node, source))
        if derived is not None:
            logits[node] = derived
        elif source is None or not _reads_statistics(layer, node, source):
            refuse(node, f"{operator_name(node)} of the logits")
    for node in layer.statistics:
        source = logits[node.args[0]]  # type: ignore[index]
        if source.has_bias != (layer.bias is not None):
            refuse(node, "a loss that reads logits before the bias is added")
    for node in logits.keys() & results:
        refuse(node, "an output of the size of the vocabulary")


def _with_bias(layer: OutputLayer, node: Node, source: Logits) -> Logits | None:
    """Returns the logits if a node is the addition of the bias.

    F.linear adds it to the product of a hidden state that is a slice.
    """
    bias = _placeholder(node.args[-1])
    if operator_name(node) != "add" or node.kwargs or source != Logits(rows=source.rows):
        return None
    if bias is None or shape_of(bias) != shape_of(node)[-1:] or layer.bias not in (None, bias):
        return None
    layer.bias = bias
    return replace(source, has_bias=True)


def _derived_logits(node: Node, source: Logits) -> Logits | None:
    """Returns the logits that a node computes, or None if it does something else."""
    name, words = operator_name(node), shape_of(node.args[0])[-1]
    if name in COPIES:
        return source
    if name in VIEWS and shape_of(node)[-1] == words:
        return replace(source, rows=(*source.rows, node))
    if name in _ROW_SLICES and not _is_last(node, node.args[1]):
        return replace(source, rows=(*source.rows, node))
    if source.normalized:
        return None
    if name == "_log_softmax" and _is_last(node, node.args[1]):
        return replace(source, normalized=True)
    numbers = all(isinstance(arg, int | float) for arg in node.args[1:])
    if name in _ELEMENTWISE and numbers:
        return replace(source, elementwise=(*source.elementwise, node))
    return None


def _reads_statistics(layer: OutputLayer, node: Node, source: Logits) -> bool:
    """Adds the statistic that a node reads to `layer`; returns False if it reads something
    else."""
    name, args = operator_name(node), node.args
    if name == "logsumexp" and not source.normalized and _is_last(node, *_dims(node)):
        layer.statistics[node] = LOG_SUM_EXP
    elif name == "sum" and len(args) > 1 and _is_last(node, *_dims(node)):
        layer.statistics[node] = LOGIT_SUM
    elif name == "gather" and _is_last(node, args[1]) and shape_of(node)[-1] == 1:
        layer.statistics[node], layer.labels[node] = LABEL_LOGIT, args[2]  # type: ignore[assignment]
    elif name == "nll_loss_forward" and source.normalized and args[2] is None:
        layer.statistics[node], layer.labels[node] = LABEL_LOGIT, args[1]  # type: ignore[assignment]
    else:
        return False
    return True


def _dims(node: Node) -> Any:
    return node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]


def _is_last(node: Node, *dims: Any) -> bool:
    """Returns True if `dims` is the last dimension of a node's first argument."""
    count = len(shape_of(node.args[0]))
    return [dim % count for dim in dims if dim is not None] == [count - 1]


def without(node: Any, operators: frozenset[str]) -> Any:
    """Returns the value behind views and copies by some operators."""
    while isinstance(node, Node) and operator_name(node) in operators:
        node = node.args[0]
    return node


def shape_of(node: Any) -> torch.Size:
    """Returns the shape of a node's value."""
    return torch.Size(node.meta["val"].shape)


def refuse(node: Node, reason: str, remedy: str = "") -> NoReturn:
    """Raises NotShardableError with the user's line of a node."""
    line = line_of(node)
    raise NotShardableError(
        f"the vocabulary cannot be sharded: the step has {reason} ({line}). {remedy or _STATISTICS}"
    )
