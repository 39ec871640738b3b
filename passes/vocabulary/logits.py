"""From an output layer to the exits of its logits (`zbcompile.passes.vocabulary.exits`): the operations in between.

Logits may be reshaped, sliced and transposed as long as the vocabulary stays one whole dimension, and pass through
elementwise operations with numbers (scale, soft cap). If anything else reads them, this is not a vocabulary layer, or
one that cannot be sharded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.torch_private import LOG_SOFTMAX, SOFTMAX, TO_COPY, UNSAFE_VIEW

aten = torch.ops.aten
Form = Literal["scores", "log_probs", "probs", "entropies"]  # the last: -p log p of every word


class NotShardable(CompileError):
    """Why a vocabulary layer cannot be sharded, or that there is none."""


@dataclass(frozen=True)
class Pointwise:
    """One elementwise operation with numbers; `at` is the position of the logits among `args`."""

    target: Any
    args: tuple[Any, ...]
    at: int

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        args = list(self.args)
        args[self.at] = value
        return self.target(*args)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Logits:
    """A value on the way: its vocabulary dimension, the elementwise operations and the moves so far.

    `form` says what has become of the scores; elementwise operations come before. A move maps any tensor with another
    last dimension than the vocabulary along.
    """

    axis: int
    pointwise: tuple[Pointwise, ...] = ()
    moves: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = ()
    form: Form = "scores"

    def move(self, value: torch.Tensor) -> torch.Tensor:
        """Apply the moves to the output layer's input, its last dimension back at the end: [tokens, width]."""
        width = value.shape[-1]
        for step in self.moves:
            value = step(value, width)
        return value.movedim(self.axis, -1).reshape(-1, width)


POINTWISE = frozenset(
    {
        *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.add.Scalar),
        *(aten.sub.Tensor, aten.sub.Scalar, aten.tanh.default, aten.neg.default),
    }
)
CASTS = frozenset({aten.to.dtype, TO_COPY, aten.to.device, aten.to.dtype_layout})
COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.alias.default})
RESHAPES = frozenset({aten.view.default, aten.reshape.default, UNSAFE_VIEW})
NORMALISATIONS: Mapping[Any, Form] = {
    **dict.fromkeys((aten.log_softmax.int, LOG_SOFTMAX), "log_probs"),
    **dict.fromkeys((aten.softmax.int, SOFTMAX), "probs"),
}


def refusal(node: Node) -> NotShardable:
    """That `node` reads logits in a way that shards cannot."""
    return NotShardable(f"the logits are read by {node.name} ({source_line(node)}), which needs all of them at once")


def step(node: Node, before: Node, logits: Logits) -> Logits:
    """The logits behind `node`, which reads those that `before` makes. Raises NotShardable for other operations."""
    if node.target in CASTS | COPIES:
        return logits
    if node.target in NORMALISATIONS and logits.form == "scores" and _dimension(node, before) == logits.axis:
        return replace(logits, form=NORMALISATIONS[node.target])
    if node.target is aten.special_entr.default and logits.form == "probs":
        return replace(logits, form="entropies")
    if node.target in POINTWISE and logits.form == "scores":
        return _pointwise(node, before, logits)
    move = _MOVES.get(node.target)
    if move is None:
        raise refusal(node)
    return move(node, before, logits)


def _dimension(node: Node, before: Node) -> int:
    return int(node.args[1]) % int(before.meta["val"].ndim)  # type: ignore[arg-type]


def _pointwise(node: Node, before: Node, logits: Logits) -> Logits:
    others = [a for a in node.args if a is not before]
    if any(not isinstance(a, int | float) for a in others) or node.kwargs:
        raise refusal(node)
    at = node.args.index(before)
    step = Pointwise(node.target, tuple(None if i == at else a for i, a in enumerate(node.args)), at)
    return replace(logits, pointwise=(*logits.pointwise, step))


def _reshape(node: Node, before: Node, logits: Logits) -> Logits:
    shape = tuple(node.meta["val"].shape)
    old = tuple(before.meta["val"].shape)
    size, front = old[logits.axis], math.prod(old[: logits.axis])
    axes = [i for i, n in enumerate(shape) if n == size and math.prod(shape[:i]) == front]
    if not axes:
        raise refusal(node)
    axis = axes[-1] if size != 1 else axes[0]

    def move(value: torch.Tensor, width: int) -> torch.Tensor:
        return value.reshape(*shape[:axis], width, *shape[axis + 1 :])

    return replace(logits, axis=axis, moves=(*logits.moves, move))


def _permute(node: Node, before: Node, logits: Logits) -> Logits:
    ndim = before.meta["val"].ndim
    if node.target is aten.permute.default:
        order = [int(d) % ndim for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        order = list(range(ndim))
        a, b = (0, ndim - 1) if node.target is aten.t.default else (int(d) % ndim for d in node.args[1:3])  # type: ignore
        order[a], order[b] = order[b], order[a]
    return replace(logits, axis=order.index(logits.axis), moves=(*logits.moves, lambda v, _: v.permute(order)))


def _slice(node: Node, before: Node, logits: Logits) -> Logits:
    """Rows may be cut away, columns not."""
    dim = int(node.args[1] if len(node.args) > 1 else 0) % before.meta["val"].ndim  # type: ignore[arg-type]
    arguments = node.args[1:]
    if dim == logits.axis:
        raise refusal(node)
    axis = logits.axis - (node.target is aten.select.int and dim < logits.axis)
    target: Any = node.target
    return replace(logits, axis=axis, moves=(*logits.moves, lambda v, _: target(v, *arguments)))


_MOVES: Mapping[Any, Callable[[Node, Node, Logits], Logits]] = {
    **dict.fromkeys((*RESHAPES, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim), _reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.slice.Tensor, aten.select.int), _slice),
}


def token_order(logits: Logits, tokens: Sequence[int]) -> list[int]:
    """The output layer's tokens (numbered in `tokens`' layout) that leave, in order."""
    numbers = torch.arange(math.prod(tokens)).reshape(*tokens, 1)
    return logits.move(numbers).flatten().tolist()  # type: ignore[no-any-return]
