"""The loss behind the output layer, or the log-probabilities of labels, as a function of a few numbers per token.

Every accepted loss is a function of log_z, target, total and maximum (`zbcompile.passes.vocabulary.exits`), so its
gradient by the logits is a * softmax(y) + b * onehot(t) + c * w with a, b, c = d loss / d (log_z, target, total): one
number each per token, which every shard computes for itself. It covers ignored tokens, label smoothing, class weights,
z-loss, and any function of a token's own probability. A forward alone may have entropies, too: log_z - mean.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.fx import argument_of, nodes_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.vocabulary.exits import Exit, RowFacts, Statistics
from zbcompile.passes.vocabulary.logits import NotShardable

Values = Mapping[Slot, torch.Tensor]


class LogitsReader(NamedTuple):
    """What reads the logits that one use of the output layer makes of some `tokens`: through `exits`, with the labels
    that the node `labels` has for them."""

    tokens: slice
    labels: Node
    exits: tuple[Exit, ...]

    def labels_in(self, values: Values) -> torch.Tensor:
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
            own = statistics.of(reading.tokens), partial(reading.labels_in, values), self.size
            given = RowFacts(*own, read=lambda node: evaluate(node, values, {}))
            known |= {leaving.node: leaving.result(given) for leaving in reading.exits}
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
    weights = _common({argument_of(e.node, "weight", None) for e in exits if e.needs_total}, "class weights")
    leaving = {e.node for e in exits}
    tail, terms = _tail(tuple(results.values()), frozenset(leaving))
    labels = [each.labels for each in readings]
    for node in labels:
        _require_data_only(node)
    read = [*labels, *tail, *(arg for e in exits for arg in e.node.all_input_nodes[1:])]
    known = leaving | set(terms)
    data = {slot for node in (*read, *([] if weights is None else [weights])) for slot in data_of(node, known)}
    totals = any(e.needs_total for e in exits)
    return RowLoss(readings, weights, totals, needs_mean, tuple(sorted(data)), size, terms, tail, results)


def _readings(uses: Sequence[Sequence[Exit]], size: int) -> tuple[LogitsReader, ...]:
    found: list[LogitsReader] = []
    for exits in uses:
        labels = _common({e.labels for e in exits} - {None}, "labels")
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
