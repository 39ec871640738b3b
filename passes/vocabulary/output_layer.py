"""Finds the output layer of a training step and the statistics of its logits that the loss reads.

Most losses of language models read the logits only through three numbers per row: the log-sum-exp,
the logit of the label and, for label smoothing, the sum of the logits. Ranks that hold shards of
the vocabulary can compute these together. Backward operations are not looked at.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.fx import Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.graph.source_location import line_of
from zbcompile.passes.step_graph import StepGraph

LOG_SUM_EXP, LABEL_LOGIT, LOGIT_SUM = "log-sum-exp", "label's logit", "sum of logits"

COPIES = frozenset({"detach", "alias", "clone"})
VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_ROW_SLICES = frozenset({"slice", "select"})
_SOFTMAXES = frozenset({"_log_softmax", "_softmax", "logsumexp"})
_ELEMENTWISE = frozenset({"mul", "div", "tanh", "_to_copy"})
_PRODUCTS = frozenset({"mm", "addmm"})
TRANSPOSES = frozenset({"t", "transpose", "permute", "numpy_T"})
CASTS = frozenset({"_to_copy"})  # of autocast, for one


@dataclass(frozen=True)
class Logits:
    """A value with one column per word of the vocabulary.

    Attributes:
        product: The matrix product that they come from.
        bias: The placeholder of the bias that has been added, or None.
        elementwise: Scales, casts and the tanh of a soft cap that were applied to the product.
        rows: Views and slices of rows that were applied to the product.
        normalized: True for log-probabilities.
    """

    product: Node
    bias: Node | None
    elementwise: tuple[Node, ...] = ()
    rows: tuple[Node, ...] = ()
    normalized: bool = False


@dataclass
class OutputLayer:
    """The output layer of a step.

    Attributes:
        products: The matrix products that compute the logits, [rows, words]; several for a loss in
            chunks.
        logits: The nodes of the forward with one column per word.
        statistics: What each operation of the loss reads of the logits. Of log-probabilities it
            reads the log-sum-exp as well.
        labels: The labels of the operations that read a label's logit.
    """

    products: list[Node]
    logits: dict[Node, Logits] = field(default_factory=dict)
    statistics: dict[Node, str] = field(default_factory=dict)
    labels: dict[Node, Node] = field(default_factory=dict)

    @property
    def hidden(self) -> list[Any]:
        """The last hidden state of each product, [rows, width]."""
        return [product.args[-2] for product in self.products]

    @property
    def weight(self) -> Any:
        """The placeholder of the weight, [words, width]."""
        return weight_of(self.products[0])

    def logits_of(self, node: Node) -> Logits:
        """Returns the logits that an operation of the loss reads."""
        return self.logits[node.args[0]]  # type: ignore[index]


class NotShardableError(CompileError):
    """The loss needs more of the logits than ranks with shards of the vocabulary exchange."""


def find_output_layer(step: StepGraph) -> OutputLayer:
    """Returns the output layer of a step: the products with a parameter that a softmax normalizes.

    Of several sizes the largest counts, because routers of experts have a softmax as well.

    Raises:
        NotShardableError: There is none, or the loss uses the logits in another way. The message
            has the user's line.
    """
    forward, results = step.forward_nodes(), {node for _, node in step.results()}
    products = {_product_below(node) for node in forward if operator_name(node) in _SOFTMAXES}
    sizes = {node: shape_of(node)[1] for node in forward if node in products}
    if not sizes:
        raise NotShardableError(
            "the vocabulary cannot be sharded: no softmax normalizes the product of a hidden state "
            "and a parameter. Compute the logits by torch.nn.Linear or F.linear, with the words in "
            "the last dimension."
        )
    layer = OutputLayer([node for node, size in sizes.items() if size == max(sizes.values())])
    for node in forward:
        _follow_logits(layer, node)
        if node in layer.logits and node in results:
            refuse(node, "an output of the size of the vocabulary")
    if any(weight_of(product) is not layer.weight for product in layer.products):
        refuse(layer.products[-1], "several output layers with weights of their own", UNSHARDED)
    return layer


def _product_below(softmax: Any) -> Node | None:
    """Returns the product with a parameter that a softmax normalizes, or None."""
    node = softmax.args[0]
    while isinstance(node, Node) and node.args and operator_name(node) not in _PRODUCTS | {"bmm"}:
        node = node.args[0]
    is_product = isinstance(node, Node) and operator_name(node) in _PRODUCTS
    return node if is_product and weight_of(node) is not None else None


def weight_of(product: Node) -> Node | None:
    """Returns the parameter whose transpose is the right operand of a product, or None."""
    node = product.args[-1]
    if not isinstance(node, Node) or operator_name(node) not in TRANSPOSES:
        return None
    return _placeholder(node.args[0])


def _placeholder(node: Any) -> Node | None:
    node = without(node, COPIES | CASTS)
    return node if isinstance(node, Node) and node.op == "placeholder" else None


UNSHARDED = 'Change the model there, or leave the output layer whole: vocab="off".'
_STATISTICS = (
    "A sharded loss reads only the log-sum-exp, the logit of the label and the sum of the logits "
    "of each row. Compute the rest outside of the step, or do not shard the vocabulary."
)


def _follow_logits(layer: OutputLayer, node: Node) -> None:
    """Adds a node of the forward to `layer` if it reads logits, and refuses what it may not
    read."""
    if node in layer.products:
        bias = _placeholder(node.args[0]) if operator_name(node) == "addmm" else None
        if operator_name(node) == "addmm" and bias is None:
            refuse(node, "a bias that is not a parameter", UNSHARDED)
        layer.logits[node] = Logits(node, bias)
    elif any(source in layer.logits for source in node.all_input_nodes):
        source = layer.logits.get(node.args[0])  # type: ignore[arg-type]
        derived = source and _derived_logits(node, source)
        if derived is not None:
            layer.logits[node] = derived
        elif source is None or not _reads_statistics(layer, node, source):
            refuse(node, f"{operator_name(node)} of the logits")


def _derived_logits(node: Node, source: Logits) -> Logits | None:
    """Returns the logits that a node computes, or None if it does something else."""
    name, words = operator_name(node), shape_of(node.args[0])[-1]
    if name in COPIES:
        return source
    is_view = name in VIEWS and shape_of(node)[-1] == words
    if is_view or (name in _ROW_SLICES and not _is_last(node)):
        return replace(source, rows=(*source.rows, node))
    if source.normalized:
        return None
    if name == "_log_softmax" and _is_last(node):
        return replace(source, normalized=True)
    numbers = all(isinstance(arg, int | float) for arg in node.args[1:])
    if name in _ELEMENTWISE and numbers:
        return replace(source, elementwise=(*source.elementwise, node))
    if name == "add" and source == Logits(source.product, None, rows=source.rows):
        # F.linear adds the bias to the product of a hidden state that is a slice.
        bias = _placeholder(node.args[1])
        if bias is not None and shape_of(bias) == (words,) and not node.kwargs:
            return replace(source, bias=bias)
    return None


def _reads_statistics(layer: OutputLayer, node: Node, source: Logits) -> bool:
    """Adds the statistic that a node reads to `layer`; returns False if it reads something
    else."""
    name, args = operator_name(node), node.args
    if name == "logsumexp" and not source.normalized and _is_last(node):
        layer.statistics[node] = LOG_SUM_EXP
    elif name == "sum" and len(args) > 1 and _is_last(node):
        layer.statistics[node] = LOGIT_SUM
    else:
        is_gather = name == "gather" and _is_last(node) and shape_of(node)[-1] == 1
        is_nll = name == "nll_loss_forward" and source.normalized and args[2] is None
        if not is_gather and not is_nll:
            return False
        layer.statistics[node] = LABEL_LOGIT
        layer.labels[node] = args[2 if is_gather else 1]  # type: ignore[assignment]
    return True


def _is_last(node: Node) -> bool:
    """Returns True if a node works along the last dimension of its first argument."""
    dims: Any = node.args[1] if isinstance(node.args[1], list) else [node.args[1]]
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
