"""One shard of the output layer: its words, its rows, and what the passes S and T both compute of them.

S (`zbcompile.passes.vocabulary.s_pass`) makes logits and statistics of the shard's words; the statistics of all shards
are gathered; the end of the barrier and T (`zbcompile.passes.vocabulary.t_pass`) turn them into the loss and gradients
(arXiv 2411.05288, algorithms 1 and 2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from zbcompile.passes.gpu import KIND, kind_of
from zbcompile.passes.vocabulary.loss import Values
from zbcompile.passes.vocabulary.output_layer import VocabularyHead

Tensor = torch.Tensor


class ScanResults(NamedTuple):
    """What leaves S.

    * `statistics`: [4, tokens], or [5, tokens] with entropies;
    * with one barrier, parts of the input gradient, each [tokens, width]: `others`, of all words but the label,
      `label_rows`, of labels of this shard, and `total_rows`, of the weighted sum of logits;
    * kept for T, `raw` [tokens, words] of every tile: what the output layer made, or where `Shard.keeps_exponentials`
      the exponentials over `maximum` [tokens], 0 at the label.
    """

    statistics: Tensor
    others: Tensor | None
    label_rows: Tensor | None
    total_rows: Tensor | None
    raw: tuple[Tensor, ...]
    maximum: Tensor | None = None


class Updates(NamedTuple):
    """What leaves T: gradients of the shard's rows, and with two barriers its part of the input gradient."""

    weight: Tensor
    bias: Tensor | None
    part: Tensor | None


class Parameters(NamedTuple):
    """The shard's rows: `weight` [words, width], `bias` [words]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Shard:
    """What rank `rank` computes: words `bounds[rank]` of the vocabulary.

    `barriers` are those of the backward (0: there is none). `keep` says whether logits wait from S for T or are
    recomputed; `tile` is how many words S and T work on at a time.
    """

    head: VocabularyHead
    rank: int
    bounds: tuple[tuple[int, int], ...]
    barriers: int
    keep: bool
    tile: int

    @property
    def low(self) -> int:
        return self.bounds[self.rank][0]

    @property
    def size(self) -> int:
        return self.bounds[self.rank][1] - self.low

    @property
    def statistics_dtype(self) -> torch.dtype:
        """fp32, or fp64 if the model computes in it."""
        return torch.promote_types(self.head.dtype, torch.float32)

    @property
    def keeps_exponentials(self) -> bool:
        """Whether exponentials wait from S for T instead of logits (`zbcompile.passes.vocabulary.s_t_exponentials`): if
        the gradient by the output is a multiple of the softmax, and products have the dtype of statistics."""
        plain = not self.head.pointwise and not self.head.loss.needs_total
        return self.keep and self.size > 0 and plain and self.head.dtype == self.statistics_dtype

    def tiles(self) -> Iterator[slice]:
        for start in range(0, self.size, self.tile):
            yield slice(start, min(start + self.tile, self.size))

    def pointwise(self, raw: Tensor) -> Tensor:
        """The logits from what the output layer makes, in the dtype of statistics."""
        return reduce(lambda y, step: step(y), self.head.pointwise, raw.to(self.statistics_dtype))

    def pull(self, raw: Tensor, gradient: Tensor) -> Tensor:
        """The gradient by what the output layer makes, from that by the logits."""
        if not self.head.pointwise:
            return gradient
        with torch.enable_grad():
            leaf = raw.detach().to(self.statistics_dtype).requires_grad_()
            return torch.autograd.grad(self.pointwise(leaf), leaf, gradient)[0]

    def raw_logits(self, hidden: Tensor, own: Parameters, words: slice) -> Tensor:
        """What the output layer makes of `hidden` [tokens, width] for some words [tokens, words]."""
        dtype = self.head.dtype
        bias = None if own.bias is None else own.bias[words].to(dtype)
        return F.linear(hidden, own.weight[words].to(dtype), bias)

    def local(self, labels: Tensor, words: slice) -> tuple[Tensor, Tensor]:
        """Whether a token's label is among `words`, and its number there (0 otherwise)."""
        own = labels - (self.low + words.start)
        inside = (own >= 0) & (own < words.stop - words.start)
        return inside, torch.where(inside, own, 0)

    def class_weight(self, values: Values, words: slice, like: Tensor) -> Tensor:
        """w of some words [words]."""
        whole = self.head.loss.weight_of(values)
        if whole is None:
            return torch.ones(words.stop - words.start, dtype=like.dtype, device=like.device)
        return whole[self.low + words.start : self.low + words.stop].to(like.dtype)

    def times_weight(self, gradient: Tensor, own: Parameters, words: slice) -> Tensor:
        """`gradient` [tokens, words] times the rows of these words, in the dtype of statistics [tokens, width].

        Factors have the model's dtype, as in the unsplit model; sums of parts that may cancel are not rounded to it.
        """
        dtype, wide = self.head.dtype, self.statistics_dtype
        rows = own.weight[words].to(dtype)
        if dtype != wide and kind_of(rows.device) == KIND:
            return torch.mm(gradient.to(dtype), rows, out_dtype=wide)
        return gradient.to(dtype).to(wide) @ rows.to(wide)


def without_label(values: Tensor, inside: Tensor, number: Tensor) -> Tensor:
    """`values` [tokens, words] with 0 at the label, which `Shard.local` has found."""
    at = number[:, None]
    return values.scatter(1, at, torch.where(inside, 0.0, values.gather(1, at)[:, 0])[:, None])


def finite(maximum: Tensor) -> Tensor:
    """The maximum, or 0 if no word is alive (a shard without words, columns masked by -inf)."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def mean_over(common: Tensor, maximum: Tensor, z: Tensor, mean: Tensor) -> Tensor:
    """`mean` (see `zbcompile.passes.vocabulary.s_pass.Scan`) over a larger maximum than that of its words."""
    return (mean + (finite(maximum) - common) * z) * (maximum - common).exp()


def joined(pieces: list[Tensor], parameter: Tensor) -> Tensor:
    """The gradient of a parameter from those of its tiles; a shard without words has none."""
    if not pieces:
        return torch.zeros_like(parameter)
    pieces = [piece.to(parameter.dtype) for piece in pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
