"""The input layer: the embedding whose rows are sharded like those of the output layer, and its two passes.

Every shard looks up the tokens among its words, and the rows are summed for the first stage; after that stage's
backward the gradient of the sum goes to all shards, and each adds the rows of its words. Which words are looked up is
known from the inputs alone, so every shard determines them for itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.fx import is_random, nodes_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.vocabulary.loss import Values, data_of, evaluate
from zbcompile.passes.vocabulary.output_layer import VocabularyHead
from zbcompile.passes.vocabulary.shard import Shard

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(frozen=True)
class VocabularyLookup:
    """`node` looks up rows of the parameter `weight` [size, width], as many as the output layer has words.

    `words` is the node of their numbers, which is computed from the inputs `data`; the row `padding` gets no gradient
    (-1: all do).
    """

    node: Node
    weight: str
    words: Node
    padding: int
    data: tuple[Slot, ...]

    def words_of(self, values: Values) -> Tensor:
        """The numbers of the rows [*tokens]."""
        return evaluate(self.words, values, {})  # type: ignore[no-any-return]


def find_lookup(canonical: Canonical, head: VocabularyHead) -> VocabularyLookup | None:
    """The embedding that can be sharded like `head`: tied to it, or the only one with as many rows; None if there is
    none, or if it is looked up in several places."""
    nodes = [node for node in canonical.graph.nodes if node.target is aten.embedding.default]
    whole = [node for node in nodes if _is_vocabulary(canonical, node, head)]
    tied = [node for node in whole if node.args[0].meta["slot"].name == head.weight]  # type: ignore[union-attr]
    candidates = tied or whole
    return _lookup(candidates[0]) if len(candidates) == 1 else None


def _is_vocabulary(canonical: Canonical, node: Node, head: VocabularyHead) -> bool:
    table = node.args[0]
    if not isinstance(table, Node) or table.op != "placeholder" or table.meta["slot"].kind != "parameter":
        return False
    name = table.meta["slot"].name
    alone = len(table.users) == 1 or name == head.weight
    scaled = len(node.args) > 3 and bool(node.args[3])  # scale_grad_by_freq counts words over all shards
    trained = name in canonical.captured.trainable
    return table.meta["val"].shape[0] == head.size and alone and trained and not scaled and _is_data(node.args[1])


def _is_data(words: object) -> bool:
    """Whether a node is made of the step's inputs without parameters and random numbers."""
    if not isinstance(words, Node):
        return False
    kinds = {slot.kind for slot in data_of(words)}
    return "input" in kinds and "parameter" not in kinds and not any(map(is_random, nodes_behind([words])))


def _lookup(node: Node) -> VocabularyLookup:
    table, words = node.args[0], node.args[1]
    assert isinstance(table, Node)
    assert isinstance(words, Node)
    padding: Any = node.args[2] if len(node.args) > 2 else -1
    return VocabularyLookup(node, table.meta["slot"].name, words, padding, tuple(sorted(data_of(words))))


def look_up(shard: Shard, lookup: VocabularyLookup, rows: Tensor, values: Values) -> Tensor:
    """The rows of the words of this shard, zeros for all others [*tokens, width]; `rows` [words, width] are its own."""
    words = lookup.words_of(values)
    if not shard.size:
        return torch.zeros((*words.shape, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    inside, number = _place(shard, words)
    return torch.where(inside[..., None], F.embedding(number, rows), 0.0)


def spread(shard: Shard, lookup: VocabularyLookup, gradient: Tensor, values: Values) -> Tensor:
    """The gradient of the shard's rows [words, width] from that of what all shards looked up [*tokens, width]."""
    words = lookup.words_of(values)
    if not shard.size:
        return gradient.new_zeros(0, gradient.shape[-1])
    inside, number = _place(shard, words)
    wanted = inside if lookup.padding < 0 else inside & (words != lookup.padding)
    rows = torch.where(wanted[..., None], gradient, 0.0)
    found: Tensor = aten.embedding_dense_backward.default(rows, number, shard.size, -1, False)
    return found


def _place(shard: Shard, words: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each word is among the shard's, and its row; words of other shards get different arbitrary rows, so that
    they do not all contend for one."""
    own = words - shard.low
    inside = (own >= 0) & (own < shard.size)
    return inside, torch.where(inside, own, words.remainder(shard.size))
