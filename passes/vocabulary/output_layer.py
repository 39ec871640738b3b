"""Recognition of the output layer and its loss in a canonical graph (vocabulary parallelism, arXiv 2411.05288).

The output layer is a linear map by a whole parameter whose result reaches the loss through exits alone
(`zbcompile.passes.vocabulary.exits`). An MLP that happens to have as many outputs fails at its activation's users.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.vocabulary.exits import Exit, follow
from zbcompile.passes.vocabulary.further_terms import rows_of
from zbcompile.passes.vocabulary.logits import CASTS, NotShardable, Pointwise, token_order
from zbcompile.passes.vocabulary.loss import RowLoss, row_loss

aten = torch.ops.aten


class LinearMap(NamedTuple):
    """Where an operation that maps linearly has its arguments (`bias` None: it has none), and whether its weight is
    [in, out]."""

    hidden: int
    weight: int
    bias: int | None
    transposed: bool


PRODUCTS: Mapping[Any, LinearMap] = {
    aten.linear.default: LinearMap(hidden=0, weight=1, bias=2, transposed=False),
    aten.addmm.default: LinearMap(hidden=1, weight=2, bias=0, transposed=True),
    **dict.fromkeys((aten.mm.default, aten.matmul.default), LinearMap(0, 1, bias=None, transposed=True)),
}


@dataclass(frozen=True)
class VocabularyHead:
    """The output layer and the loss behind it.

    Each of `linears` makes logits of `size` words from an input of its own by `weight` [size, width] and `bias` [size],
    as the heads of a model that predicts several tokens ahead do; `loss` is what is computed where the vocabulary
    dimension ends.
    """

    linears: tuple[Node, ...]
    weight: str
    bias: str | None
    size: int
    width: int
    loss: RowLoss

    @property
    def pointwise(self) -> tuple[Pointwise, ...]:
        return self.loss.readings[0].exits[0].logits.pointwise

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the logits are computed."""
        return self.linears[0].meta["val"].dtype  # type: ignore[no-any-return]

    @property
    def logits(self) -> int:
        """How many logits are computed, those that the loss does not read included."""
        return sum(linear.meta["val"].numel() for linear in self.linears)

    @property
    def terms(self) -> list[torch.dtype]:
        """The dtypes of the loss's terms that are no logits."""
        return [node.meta["val"].dtype for node in self.loss.terms]

    @property
    def reads(self) -> tuple[Node, ...]:
        """What the trunk makes for the shards: the inputs of all `linears`, and the terms of the loss."""
        return (*map(_hidden, self.linears), *self.loss.terms)

    def tokens(self, *reads: torch.Tensor) -> torch.Tensor:
        """The rows of the output layer's inputs that have a logit in the loss, [tokens, width]; behind them those with
        the terms of the loss (`zbcompile.passes.vocabulary.further_terms`)."""
        count = len(self.linears)
        moved = [r.exits[0].logits.move(each) for r, each in zip(self.loss.readings, reads[:count], strict=True)]
        if self.terms:
            moved.append(rows_of(reads[count:], moved[0].dtype, self.width))
        return (torch.cat(moved) if len(moved) > 1 else moved[0]).contiguous()

    def __str__(self) -> str:
        bias = "" if self.bias is None else f" + {self.bias}"
        exits = ", ".join(str(leaving.node.target) for r in self.loss.readings for leaving in r.exits)
        return f"{self.weight} [{self.size}, {self.width}]{bias} -> {exits}"


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
    weight = _weight(linear)
    assert weight is not None
    linears = tuple(node for node in canonical.graph.nodes if _weight(node) is weight)
    uses = [follow(each) for each in linears]
    for each, exits in zip(linears, uses, strict=True):
        _require_one_function(exits, _hidden(each))
    bias = _common_form(linears, uses)
    name = weight.meta["slot"].name
    _require_single_use(weight, linears, name)
    if name not in canonical.captured.trainable:
        raise NotShardable(f"{name} is frozen; only a trained output layer is sharded")
    size, width = weight.meta["val"].shape
    bias_name = None if bias is None else bias.meta["slot"].name
    loss = row_loss(canonical, uses, size)
    _require_range(loss, _hidden(linear).meta["val"].dtype)
    return VocabularyHead(linears, name, bias_name, size, width, loss)


def _require_range(loss: RowLoss, rows: torch.dtype) -> None:
    """A wider number has its digits in pieces of bfloat16 and float32, but may be too large, or small, for float16."""
    wide = [node for node in loss.terms if torch.promote_types(node.meta["val"].dtype, rows) != rows]
    if wide and rows == torch.float16:
        raise NotShardable(
            f"the loss also reads {wide[0].name} in {wide[0].meta['val'].dtype}, but the layer is in {rows}"
        )


def _common_form(linears: tuple[Node, ...], uses: list[list[Exit]]) -> Node | None:
    """The bias of all uses of an output layer, which must be of one form."""
    biases = {_bias(linear, len(linears)) for linear in linears}
    forms = {(linear.meta["val"].dtype, exits[0].logits.pointwise) for linear, exits in zip(linears, uses, strict=True)}
    if len(biases) > 1 or len(forms) > 1:
        raise NotShardable("the uses of the output layer differ in bias, dtype, soft cap or scale; make them alike")
    return biases.pop()


def _require_one_function(exits: list[Exit], hidden: Node) -> None:
    first, tokens = exits[0].logits, tuple(hidden.meta["val"].shape[:-1])
    for other in exits[1:]:
        if other.logits.pointwise != first.pointwise:
            raise NotShardable("the loss reads logits before and after a soft cap or scale; use the same in all terms")
        if token_order(other.logits, tokens) != token_order(first, tokens):
            raise NotShardable("the terms of the loss read the logits of different tokens; shift them alike")


def _require_single_use(weight: Node, linears: tuple[Node, ...], name: str) -> None:
    """Every use of the parameter, cast or transposed, must be the output layer's, or a lookup of a tied embedding."""
    lookups = (*linears, *(user for user in weight.users if user.target is aten.embedding.default))
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
    product = PRODUCTS.get(node.target)
    return None if product is None else _parameter(node.args[product.weight], product.transposed)


def _hidden(linear: Node) -> Node:
    found = linear.args[PRODUCTS[linear.target].hidden]
    assert isinstance(found, Node)
    return found


def _bias(linear: Node, uses: int) -> Node | None:
    at = PRODUCTS[linear.target].bias
    found = None if at is None or len(linear.args) <= at else linear.args[at]
    if found is None:
        return None
    parameter = _parameter(found, transposed=False, ndim=1)
    if parameter is None or len(parameter.users) > uses:
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
