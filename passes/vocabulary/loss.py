"""The loss behind the output layer, or the log-probabilities of labels, as a function of a few numbers per token.

With y the logits of a token, m their maximum and t that of its label, every accepted loss is a function of

    log_z = log sum_j exp(y_j - m),    target = y_t - m,    total = sum_j w_j (y_j - m),    maximum = m

(w: class weights, or ones), so its gradient by the logits is a * softmax(y) + b * onehot(t) + c * w with
a, b, c = d loss / d (log_z, target, total): one number each per token, which every shard computes for itself. It covers
ignored tokens, label smoothing, class weights, z-loss, and any function of a token's own probability. A forward alone
may have entropies, too: log_z - mean, with mean = sum_j softmax(y)_j (y_j - m).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.fx import argument_of, nodes_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.vocabulary.logits import Exit, NotShardable

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers of reductions; 0 is none


class Statistics(NamedTuple):
    """Per token [tokens], in the dtype of statistics (see the module)."""

    log_z: torch.Tensor
    target: torch.Tensor
    total: torch.Tensor | None
    maximum: torch.Tensor
    mean: torch.Tensor | None = None

    def of(self, tokens: slice) -> "Statistics":
        """Those of some tokens."""
        return Statistics(*(None if each is None else each[tokens] for each in self))  # type: ignore[arg-type]


Values = Mapping[Slot, torch.Tensor]


class LogitsReader(NamedTuple):
    """What reads the logits that one use of the output layer makes of some `tokens`: through `exits`, with the labels
    that the node `labels` has for them."""

    tokens: slice
    labels: Node
    exits: tuple[Exit, ...]

    def labels_in(self, values: "Values") -> torch.Tensor:
        return evaluate(self.labels, values, {}).flatten()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RowLoss:
    """`readings` are of all tokens, `class_weights` is the node of w (None: ones), `tail` what follows the exits, which
    reads `terms`, trained numbers that are no logits; `results` what is computed: the loss, or the outputs of a forward
    alone.

    `data` are the slots of what these read: inputs, constants and buffers.
    """

    readings: tuple[LogitsReader, ...]
    class_weights: Node | None
    needs_total: bool
    needs_mean: bool
    data: tuple[Slot, ...]
    size: int
    terms: tuple[Node, ...]
    tail: tuple[Node, ...]
    results: Mapping[Slot, Node]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.readings[-1].tokens.stop)

    @property
    def rows(self) -> int:
        """How many statistics per token every shard sends."""
        return 4 + self.needs_mean

    @property
    def like(self) -> torch.Tensor:
        """The fake value of the first result."""
        return next(iter(self.results.values())).meta["val"]  # type: ignore[no-any-return]

    def label_of(self, values: Values) -> torch.Tensor:
        """The label of every token [tokens]; what is no word is ignored by the loss."""
        return torch.cat([each.labels_in(values) for each in self.readings])

    def weight_of(self, values: Values) -> torch.Tensor | None:
        """w [size]."""
        return None if self.class_weights is None else evaluate(self.class_weights, values, {})

    def __call__(
        self, statistics: Statistics, values: Values, terms: Sequence[torch.Tensor] = ()
    ) -> dict[Slot, torch.Tensor]:
        """The results, in the dtypes in which the model returns them."""
        known: dict[Node, Any] = dict(zip(self.terms, terms, strict=True))
        for reading in self.readings:
            own = statistics.of(reading.tokens)
            known |= {leaving.node: _leave(self, leaving, own, values, reading) for leaving in reading.exits}
        for node in self.tail:
            evaluate(node, values, known)
        return {slot: known[node].to(node.meta["val"].dtype) for slot, node in self.results.items()}


def row_loss(canonical: Canonical, uses: Sequence[Sequence[Exit]], size: int) -> RowLoss:
    """The loss as a function of the exits of every use of the output layer. Raises NotShardable if it reads anything
    else that is trained, but numbers."""
    exits = [leaving for each in uses for leaving in each]
    results = {s: n for s, n in canonical.outputs if s.kind in ("loss", "output") and isinstance(n, Node)}
    needs_mean = any(e.logits.form == "entropies" for e in exits)
    if needs_mean and Slot("loss") in results:
        raise NotShardable("the loss has an entropy, whose gradient needs all logits at once")
    readings = _readings(uses, size)
    weights = _common({argument_of(e.node, "weight", None) for e in exits if _totals(e.node)}, "class weights")
    leaving = {e.node for e in exits}
    tail, terms = _tail(tuple(results.values()), frozenset(leaving))
    labels = [each.labels for each in readings]
    for node in labels:
        _require_data_only(node)
    read = [*labels, *tail, *(arg for e in exits for arg in e.node.all_input_nodes[1:])]
    known = leaving | set(terms)
    data = {slot for node in (*read, *([] if weights is None else [weights])) for slot in data_of(node, known)}
    totals = any(_totals(e.node) and e.logits.form != "entropies" for e in exits)
    return RowLoss(readings, weights, totals, needs_mean, tuple(sorted(data)), size, terms, tail, results)


def _readings(uses: Sequence[Sequence[Exit]], size: int) -> tuple[LogitsReader, ...]:
    found: list[LogitsReader] = []
    for exits in uses:
        labels = _common({_labels(e.node) for e in exits} - {None}, "labels")
        if labels is None:
            raise NotShardable("no term of the loss has labels")
        begin = found[-1].tokens.stop if found else 0
        tokens = exits[0].node.args[0].meta["val"].numel() // size  # type: ignore[union-attr]
        found.append(LogitsReader(slice(begin, begin + tokens), labels, tuple(exits)))
    return tuple(found)


def _common(found: set[Any], what: str) -> Any:
    if len(found) > 1:
        raise NotShardable(f"the terms of the loss use different {what}")
    return next(iter(found), None)


def _labels(node: Node) -> Node | None:
    """The node of an exit's labels without the dimension that gather wants."""
    if node.target in (aten.logsumexp.default, aten.sum.dim_IntList, aten.mean.dim):
        return None
    labels = node.args[2] if node.target is aten.gather.default else node.args[1]
    while isinstance(labels, Node) and labels.target in (aten.unsqueeze.default, aten.clone.default):
        labels = labels.args[0]
    assert isinstance(labels, Node)
    return labels


def _totals(node: Node) -> bool:
    """Whether an exit needs the sum over the vocabulary."""
    if node.target is aten.cross_entropy_loss.default:
        return bool(argument_of(node, "label_smoothing", 0.0) != 0.0)
    return node.target in (aten.sum.dim_IntList, aten.mean.dim)


def _tail(results: Sequence[Node], exits: frozenset[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What leads from exits to results, in graph order, and the trained numbers that it reads besides the exits."""
    after, nodes = set(exits), results[0].graph.nodes
    for node in nodes:
        if node.op == "call_function" and any(a in after for a in node.all_input_nodes):
            after.add(node)
    if not after.issuperset(results):
        raise NotShardable("the logits do not reach the loss")
    terms: dict[Node, None] = {}
    wanted, queue = set(results), [node for node in results if node not in exits]
    while queue:
        for argument in queue.pop().all_input_nodes:
            if argument in wanted:
                continue
            if argument in after:
                wanted.add(argument)
                if argument not in exits:
                    queue.append(argument)
            elif argument.meta.get("differentiable") and argument.meta["val"].numel() == 1:
                terms[argument] = None
            else:
                _require_data_only(argument)
    lost = [node for node in exits if node not in wanted]
    if lost:
        raise NotShardable(f"{lost[0].name} does not reach the loss")
    return tuple(node for node in nodes if node in wanted and node not in exits), tuple(terms)


def _require_data_only(node: Node) -> None:
    if node.meta.get("differentiable"):
        raise NotShardable(
            f"the loss also reads {node.name} ({source_line(node)}), which is trained, neither a logit nor a single "
            "number: the output layer is not sharded"
        )


def data_of(node: Node, known: Set[Node] = frozenset()) -> set[Slot]:
    """The slots of all that `node` is computed from, but for what is `known`."""
    behind = nodes_behind([node], lambda each: each not in known)
    return {each.meta["slot"] for each in behind if each.op == "placeholder"}


def evaluate(node: Node, values: Values, known: dict[Node, Any]) -> Any:
    """The value of `node`, from data and what is known."""
    if node not in known:
        if node.op == "placeholder":
            known[node] = values[node.meta["slot"]]
        elif node.op == "get_attr":
            known[node] = getattr(node.graph.owning_module, str(node.target))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda a: evaluate(a, values, known))
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _leave(loss: RowLoss, leaving: Exit, given: Statistics, values: Values, reading: LogitsReader) -> torch.Tensor:
    """The result of an exit, from statistics: one value per token in the layout of the logits, or a whole loss."""
    node = leaving.node
    normalised = leaving.logits.form == "log_probs"
    log_sum = given.log_z if normalised else -given.maximum  # y_t = target + m, log p_t = target - log_z
    target: Any = node.target
    if leaving.logits.form == "entropies":
        assert given.mean is not None
        return (given.log_z - given.mean).reshape(node.meta["val"].shape)
    if target is aten.logsumexp.default:
        if normalised:
            raise NotShardable("logsumexp of log probabilities is zero")
        return (given.maximum + given.log_z).reshape(node.meta["val"].shape)
    if target is aten.gather.default:
        return (given.target - log_sum).reshape(node.meta["val"].shape)
    if target in (aten.sum.dim_IntList, aten.mean.dim):
        assert given.total is not None
        total = given.total - loss.size * log_sum
        return (total if target is aten.sum.dim_IntList else total / loss.size).reshape(node.meta["val"].shape)
    return _cross_entropy(loss, node, given, values, reading)


def _cross_entropy(loss: RowLoss, node: Node, given: Statistics, values: Values, reading: LogitsReader) -> torch.Tensor:
    """F.cross_entropy and F.nll_loss (torch/aten/native/LossNLL.cpp), rows that are ignored exactly 0."""
    class_weights = argument_of(node, "weight", None)
    weights = None if class_weights is None else evaluate(class_weights, values, {})
    reduction, ignore = argument_of(node, "reduction", MEAN), argument_of(node, "ignore_index", -100)
    smoothing = argument_of(node, "label_smoothing", 0.0)
    labels = reading.labels_in(values)
    valid = labels != ignore
    ones = torch.ones_like(given.log_z)
    of_label = ones if weights is None else weights.to(ones.dtype)[torch.where(valid, labels, 0)]
    rows = (given.log_z - given.target) * of_label
    if smoothing:
        assert given.total is not None
        everything = loss.size if weights is None else weights.to(ones.dtype).sum()
        rows = (1 - smoothing) * rows + smoothing / loss.size * (everything * given.log_z - given.total)
    zeros = torch.zeros_like(rows)
    rows = torch.where(valid, rows, zeros)
    if reduction == MEAN:
        return rows.sum() / torch.where(valid, of_label, zeros).sum()
    return rows.sum() if reduction == SUM else rows.reshape(node.meta["val"].shape)
