"""The exits of the logits: operations that reduce the vocabulary to a number per token, or to a loss, in one table.

Of a token a shard has a few statistics over all words, not their logits. A row of the table says which logits an
operation may read, where it has its labels, and how its result is computed from the statistics. With y the logits of
a token, m their maximum and t that of its label, these are

    log_z = log sum_j exp(y_j - m),    target = y_t - m,    total = sum_j w_j (y_j - m),    maximum = m

(w: class weights, or ones), in a forward alone also mean = sum_j softmax(y)_j (y_j - m).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.graph.fx import argument_of
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.vocabulary.logits import Form, Logits, NotShardable, refusal, step

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers of reductions; 0 is none


class Statistics(NamedTuple):
    """Per token [tokens], in the dtype of statistics (see the module)."""

    log_z: Tensor
    target: Tensor
    total: Tensor | None
    maximum: Tensor
    mean: Tensor | None = None

    def of(self, tokens: slice) -> "Statistics":
        """Those of some tokens."""
        return Statistics(*(None if each is None else each[tokens] for each in self))  # type: ignore[arg-type]


class RowFacts(NamedTuple):
    """What the result of an exit is computed from: the statistics of its tokens, their labels, how many words there
    are, and the values of nodes that read only data."""

    statistics: Statistics
    labels: Callable[[], Tensor]
    words: int
    read: Callable[[Node], Tensor]


class ExitRule(NamedTuple):
    """An operation of the table. `result` computes it for each form that it may read, from what is known and from what
    is to be subtracted of y - m: log z for log-probabilities, -m for scores. `fits` says whether it reduces the
    vocabulary, `labels` which argument has the labels (None: none), `totals` whether it needs their sum over it."""

    result: Mapping[Form, Callable[[Node, RowFacts, Tensor], Tensor]]
    fits: Callable[[Node, Logits], bool]
    labels: int | None = None
    totals: Callable[[Node], bool] = lambda node: False


@dataclass(frozen=True)
class Exit:
    """A node that reduces the vocabulary dimension away, and its inputs."""

    node: Node
    logits: Logits

    @property
    def labels(self) -> Node | None:
        """The node of its labels without the dimension that gather wants."""
        at = EXITS[self.node.target].labels
        labels = None if at is None else self.node.args[at]
        while isinstance(labels, Node) and labels.target in (aten.unsqueeze.default, aten.clone.default):
            labels = labels.args[0]
        assert labels is None or isinstance(labels, Node)
        return labels

    @property
    def needs_total(self) -> bool:
        """Whether it needs the sum over the vocabulary."""
        return self.logits.form != "entropies" and EXITS[self.node.target].totals(self.node)

    def result(self, known: RowFacts) -> Tensor:
        """One value per token in the layout of the logits, or a whole loss."""
        normalised = self.logits.form == "log_probs"
        log_sum = known.statistics.log_z if normalised else -known.statistics.maximum
        return EXITS[self.node.target].result[self.logits.form](self.node, known, log_sum)


def follow(linear: Node) -> list[Exit]:
    """Every exit of the logits that `linear` makes. Raises NotShardable for any other use."""
    axis = linear.meta["val"].ndim - 1
    found: dict[Node, Logits] = {linear: Logits(axis)}
    exits = []
    for node in linear.graph.nodes:
        read = [argument for argument in node.all_input_nodes if argument in found]
        if not read or node in found:
            continue
        if len(read) > 1 or node.op == "output":
            raise refusal(node)
        logits = found[read[0]]
        if node.target in EXITS:
            exits.append(_exit(node, logits))
        else:
            found[node] = step(node, read[0], logits)
    if not exits:
        raise NotShardable(f"the output of {linear.name} reaches no loss")
    return exits


def _exit(node: Node, logits: Logits) -> Exit:
    rule = EXITS[node.target]
    if logits.form == "scores" and logits.form not in rule.result:
        raise NotShardable(f"{node.name} reads logits that are not log probabilities ({source_line(node)})")
    if logits.form not in rule.result or not rule.fits(node, logits):
        raise refusal(node)
    return Exit(node, logits)


def _has_classes(node: Node, logits: Logits) -> bool:
    """The class dimension of the losses is 1."""
    return logits.axis == min(1, node.args[0].meta["val"].ndim - 1)  # type: ignore[union-attr]


def _is_over_words(node: Node, logits: Logits) -> bool:
    given: Any = node.args[1]
    dims = list(given) if isinstance(given, Sequence) else [given]
    ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    return [dim % ndim for dim in dims] == [logits.axis]


def _takes_one_word(node: Node, logits: Logits) -> bool:
    return _is_over_words(node, logits) and bool(node.meta["val"].shape[logits.axis] == 1)


def _is_smoothed(node: Node) -> bool:
    return bool(argument_of(node, "label_smoothing", 0.0) != 0.0)


def _at_label(node: Node, known: RowFacts, log_sum: Tensor) -> Tensor:
    return (known.statistics.target - log_sum).reshape(node.meta["val"].shape)


def _log_sum_exp(node: Node, known: RowFacts, _: Tensor) -> Tensor:
    return (known.statistics.maximum + known.statistics.log_z).reshape(node.meta["val"].shape)


def _sum(node: Node, known: RowFacts, log_sum: Tensor) -> Tensor:
    assert known.statistics.total is not None
    total = known.statistics.total - known.words * log_sum
    return (total / known.words if node.target is aten.mean.dim else total).reshape(node.meta["val"].shape)


def _entropy(node: Node, known: RowFacts, _: Tensor) -> Tensor:
    assert known.statistics.mean is not None
    return (known.statistics.log_z - known.statistics.mean).reshape(node.meta["val"].shape)


def _cross_entropy(node: Node, known: RowFacts, _: Tensor) -> Tensor:
    """F.cross_entropy and F.nll_loss (torch/aten/native/LossNLL.cpp), rows that are ignored exactly 0."""
    class_weights, given = argument_of(node, "weight", None), known.statistics
    weights = None if class_weights is None else known.read(class_weights)
    reduction, ignore = argument_of(node, "reduction", MEAN), argument_of(node, "ignore_index", -100)
    smoothing = argument_of(node, "label_smoothing", 0.0)
    labels = known.labels()
    valid = labels != ignore
    ones = torch.ones_like(given.log_z)
    of_label = ones if weights is None else weights.to(ones.dtype)[torch.where(valid, labels, 0)]
    rows = (given.log_z - given.target) * of_label
    if smoothing:
        assert given.total is not None
        everything = known.words if weights is None else weights.to(ones.dtype).sum()
        rows = (1 - smoothing) * rows + smoothing / known.words * (everything * given.log_z - given.total)
    zeros = torch.zeros_like(rows)
    rows = torch.where(valid, rows, zeros)
    if reduction == MEAN:
        return rows.sum() / torch.where(valid, of_label, zeros).sum()
    return rows.sum() if reduction == SUM else rows.reshape(node.meta["val"].shape)


EXITS: Mapping[Any, ExitRule] = {
    aten.cross_entropy_loss.default: ExitRule(
        {"scores": _cross_entropy, "log_probs": _cross_entropy}, _has_classes, labels=1, totals=_is_smoothed
    ),
    **dict.fromkeys(
        (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default),
        ExitRule({"log_probs": _cross_entropy}, _has_classes, labels=1),
    ),
    aten.gather.default: ExitRule({"scores": _at_label, "log_probs": _at_label}, _takes_one_word, labels=2),
    aten.logsumexp.default: ExitRule({"scores": _log_sum_exp}, _is_over_words),
    aten.mean.dim: ExitRule({"scores": _sum, "log_probs": _sum}, _is_over_words, totals=lambda node: True),
    aten.sum.dim_IntList: ExitRule(
        {"scores": _sum, "log_probs": _sum, "entropies": _entropy}, _is_over_words, totals=lambda node: True
    ),
}
