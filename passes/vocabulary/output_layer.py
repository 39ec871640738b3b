"""Recognition of the output layer and its loss in a canonical graph (vocabulary parallelism, arXiv 2411.05288).

The output layer is a linear map by a whole parameter whose result reaches the loss through exits alone
(`zbcompile.passes.vocabulary.logits`). An MLP that happens to have as many outputs fails at its activation's users.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.vocabulary.logits import CASTS, Exit, NotShardable, Pointwise, follow, token_order
from zbcompile.passes.vocabulary.loss import RowLoss, row_loss

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.matmul.default})


@dataclass(frozen=True)
class VocabularyHead:
    """The output layer and the loss behind it.

    `linear` makes the logits of `size` words from `hidden` by `weight` [size, width] and `bias` [size]; `exits` are
    where the vocabulary dimension ends, `loss` what is computed of them.
    """

    linear: Node
    hidden: Node
    weight: str
    bias: str | None
    size: int
    width: int
    exits: tuple[Exit, ...]
    loss: RowLoss

    @property
    def pointwise(self) -> tuple[Pointwise, ...]:
        return self.exits[0].logits.pointwise

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the logits are computed."""
        return self.linear.meta["val"].dtype  # type: ignore[no-any-return]

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of the output layer's input that have a logit in the loss: [tokens, width]."""
        return self.exits[0].logits.move(hidden).contiguous()

    def __str__(self) -> str:
        bias = "" if self.bias is None else f" + {self.bias}"
        return f"{self.weight} [{self.size}, {self.width}]{bias} -> {', '.join(str(e.node.target) for e in self.exits)}"


def find_head(canonical: Canonical) -> VocabularyHead:
    """The output layer that can be sharded. Raises NotShardable with the reason for the likeliest candidate."""
    reasons: list[tuple[int, NotShardable]] = []
    for linear in reversed([node for node in canonical.graph.nodes if _weight(node) is not None]):
        try:
            return _head(canonical, linear)
        except NotShardable as reason:
            reasons.append((linear.meta["val"].shape[-1], reason))
    if not reasons:
        raise NotShardable("the model has no linear layer whose weight is a whole parameter")
    raise max(reasons, key=lambda each: each[0])[1]


def _head(canonical: Canonical, linear: Node) -> VocabularyHead:
    weight, hidden, bias = _weight(linear), _hidden(linear), _bias(linear)
    assert weight is not None
    exits = follow(linear)
    _require_one_function(exits, hidden)
    name = weight.meta["slot"].name
    _require_single_use(weight, linear, name)
    if name not in canonical.captured.trainable:
        raise NotShardable(f"{name} is frozen; only a trained output layer is sharded")
    size, width = weight.meta["val"].shape
    loss = row_loss(canonical, exits, size)
    bias_name = None if bias is None else bias.meta["slot"].name
    return VocabularyHead(linear, hidden, name, bias_name, size, width, tuple(exits), loss)


def _require_one_function(exits: list[Exit], hidden: Node) -> None:
    first, tokens = exits[0].logits, tuple(hidden.meta["val"].shape[:-1])
    for other in exits[1:]:
        if other.logits.pointwise != first.pointwise:
            raise NotShardable("the loss reads logits before and after a soft cap or scale; use the same in all terms")
        if token_order(other.logits, tokens) != token_order(first, tokens):
            raise NotShardable("the terms of the loss read the logits of different tokens; shift them alike")


def _require_single_use(weight: Node, linear: Node, name: str) -> None:
    """Every use of the parameter must be the output layer's, through casts and transposes, or a lookup of a tied
    embedding."""
    lookups = (linear, *(user for user in weight.users if user.target is aten.embedding.default))
    others = [user for user in _readers(weight) if user not in lookups]
    if others:
        raise NotShardable(f"{name} is also read by {others[0].name}, neither the output layer nor an embedding")


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in CASTS or user.target in (aten.t.default, aten.transpose.int, aten.permute.default):
            yield from _readers(user)
        else:
            yield user


def _weight(node: Node) -> Node | None:
    """The parameter [out, in] by which `node` maps linearly; None if it does not."""
    if node.op != "call_function":
        return None
    if node.target is aten.linear.default:
        return _parameter(node.args[1], transposed=False)
    if node.target in PRODUCTS:
        return _parameter(node.args[1], transposed=True)
    return _parameter(node.args[2], transposed=True) if node.target is aten.addmm.default else None


def _hidden(linear: Node) -> Node:
    found = linear.args[1] if linear.target is aten.addmm.default else linear.args[0]
    assert isinstance(found, Node)
    return found


def _bias(linear: Node) -> Node | None:
    at = 0 if linear.target is aten.addmm.default else 2
    found = linear.args[at] if len(linear.args) > at and linear.target not in PRODUCTS else None
    if found is None:
        return None
    parameter = _parameter(found, transposed=False, ndim=1)
    if parameter is None or len(parameter.users) > 1:
        raise NotShardable(f"the bias of {linear.name} is not a separate parameter")
    return parameter


def _parameter(node: object, transposed: bool, ndim: int = 2) -> Node | None:
    """The parameter behind casts and transposes; with `transposed` their number must be odd."""
    count = 0
    while isinstance(node, Node) and node.op == "call_function":
        swaps = node.target is aten.t.default or (node.target in (aten.transpose.int, aten.permute.default))
        if not swaps and node.target not in CASTS:
            return None
        count += swaps
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "placeholder" or node.meta["slot"].kind != "parameter":
        return None
    return node if node.meta["val"].ndim == ndim and count % 2 == transposed else None
