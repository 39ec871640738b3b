"""The passes of one vocabulary shard, as functions of tensors.

S computes the logits of the shard's words and their statistics. STATS combines the statistics of
all shards into the loss and its gradient by row. T computes the gradients of the shard's rows of
the weight. The input gradient is summed over shards behind STATS (one barrier) or T (two), as in
algorithms 2 and 1 of arXiv:2411.05288.

With one barrier S multiplies exponentials and weight before it knows the global softmax. It leaves
the label's word out, and STATS adds (P_t - 1) W_t with P_t - 1 = expm1(log P_t): for a confident
token the two products differ by all the digits of bfloat16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.exported.vocabulary.row_loss import Factors, Statistics
from zbcompile.passes.gpu import KIND, kind_of


@dataclass(frozen=True)
class Shard:
    """The words of one rank.

    Attributes:
        bounds: First and last word, plus one, of every rank.
        form: The elementwise operations between product and softmax.
        dtype: Of the product. Statistics are in float32, or in float64 if the model is.
        barriers: 1 or 2; 0 for a forward alone.
        has_total: True if the loss reads the sum of the logits.
    """

    rank: int
    bounds: Sequence[tuple[int, int]]
    form: tuple[Node, ...]
    dtype: torch.dtype
    barriers: int
    has_total: bool

    @property
    def low(self) -> int:
        return self.bounds[self.rank][0]

    @property
    def words(self) -> int:
        return self.bounds[self.rank][1] - self.low

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics."""
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, product: Tensor) -> Tensor:
        """Returns what the softmax normalizes, in the dtypes of the model."""
        for node in self.form:
            product = node.target(product, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return product

    def pull_back(self, product: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient by the product from the gradient by the logits."""
        if not self.form:
            return gradient
        with torch.enable_grad():
            leaf = product.detach().requires_grad_()
            logits = self.logits(leaf)
            return torch.autograd.grad(logits, leaf, gradient.to(logits.dtype))[0]

    def local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether a label is a word of this shard, and its number there, [rows, 1] each."""
        return local_rows(labels, self.low, self.words)

    def times_weight(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns gradient [rows, words] times weight, a part of the input gradient.

        The factors have the model's dtype. Parts of several shards may cancel, so they are wide.
        """
        factor, rows = gradient.to(self.dtype), weight.to(self.dtype)
        if self.dtype != self.wide and kind_of(rows.device) == KIND:
            return torch.mm(factor, rows, out_dtype=self.wide)
        return factor.to(self.wide) @ rows.to(self.wide)


class Scan(NamedTuple):
    """The results of S.

    Attributes:
        statistics: [3 or 4, rows]: maximum, sum of exponentials, label's logit, sum of logits.
        product: [rows, words], kept for T; None for a shard without words.
        others: With one barrier: sum of softmax times weight over all words but the label.
        label_rows: With one barrier: the weight of the label, 0 if it is of another shard.
        total_rows: With one barrier and a sum of logits: the gradient of that sum.
    """

    statistics: Tensor
    product: Tensor | None
    others: Tensor | None = None
    label_rows: Tensor | None = None
    total_rows: Tensor | None = None

    def saved(self) -> dict[str, Tensor]:
        """Returns what STATS or T needs."""
        values = self._asdict()
        del values["statistics"]
        return {name: value for name, value in values.items() if value is not None}


def scan(shard: Shard, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Scan:
    """Pass S. Statistics are of this shard's words alone."""
    rows, width = hidden.shape
    if not shard.words:
        zeros = hidden.new_zeros(rows, dtype=shard.wide)
        nothing = [torch.full_like(zeros, -torch.inf), zeros, zeros, zeros][: 3 + shard.has_total]
        none = hidden.new_zeros((rows, width), dtype=shard.wide) if shard.barriers == 1 else None
        return Scan(torch.stack(nothing), None, none, none, none if shard.has_total else None)
    bias = None if bias is None else bias.to(shard.dtype)
    product = F.linear(hidden, weight.to(shard.dtype), bias)
    logits = shard.logits(product).to(shard.wide)
    is_local, number = shard.local_labels(labels)
    maximum = logits.amax(1)
    shifted = logits - _finite(maximum)[:, None]
    exponentials = shifted.exp()
    summed = exponentials.sum(1)
    label = torch.where(is_local, logits.gather(1, number), 0.0).squeeze(1)
    statistics = [maximum, summed, label, *([shifted.sum(1)] if shard.has_total else ())]
    stacked = torch.stack(statistics)
    if shard.barriers != 1:
        return Scan(stacked, product)
    at_label = torch.where(is_local, 0.0, exponentials.gather(1, number))
    pulled = shard.pull_back(product, exponentials.scatter(1, number, at_label))
    positive = torch.where(summed > 0, summed, 1.0)
    others = shard.times_weight(pulled, weight) / positive[:, None]
    slope = shard.pull_back(product.gather(1, number), is_local.to(shard.wide)).to(shard.wide)
    label_rows = slope * weight[number.squeeze(1)].to(shard.dtype).to(shard.wide)
    total_rows = None
    if shard.has_total:
        total_rows = shard.times_weight(shard.pull_back(product, torch.ones_like(logits)), weight)
    return Scan(stacked, product, others, label_rows, total_rows)


def combine(shard: Shard, gathered: Tensor) -> tuple[Statistics, Tensor]:
    """Returns the statistics of all words, and the sums of exponentials of every shard.

    The sums are relative to the common maximum, [shards, rows].
    """
    maxima, sums, labels, *totals = gathered.unbind(1)
    maximum = _finite(maxima.amax(0))
    shares = sums * (maxima - maximum).exp()
    total = torch.zeros_like(maximum)
    if totals:
        counts = [high - low for low, high in shard.bounds]
        words = torch.tensor(counts, dtype=gathered.dtype, device=gathered.device)
        total = (totals[0] + (_finite(maxima) - maximum) * words[:, None]).sum(0)
    log_sum = shares.sum(0).log()
    return Statistics(maximum, log_sum, labels.sum(0) - maximum, total), shares


def coefficients_of(statistics: Statistics, gradient: Factors) -> Tensor:
    """Returns what T needs of every row, [5, rows].

    These are the maximum, the logarithm of the sum, the factor of the softmax, the gradient at the
    label, and the gradient at every word.
    """
    softmax, label, words = (rows.to(statistics.maximum.dtype) for rows in gradient[:3])
    at_label = softmax * torch.expm1(statistics.label - statistics.log_sum) + (softmax + label)
    return torch.stack([statistics.maximum, statistics.log_sum, softmax, at_label, words])


def input_gradient(
    shard: Shard, coefficients: Tensor, shares: Tensor, kept: Mapping[str, Tensor]
) -> Tensor:
    """Returns this shard's part of the input gradient with one barrier, [rows, width]."""
    _, _, softmax, at_label, words = coefficients.unbind(0)
    share = softmax * shares[shard.rank] / shares.sum(0)
    part = share[:, None] * kept["others"] + at_label[:, None] * kept["label_rows"]
    if "total_rows" in kept:
        part = part + words[:, None] * kept["total_rows"]
    return part


def logit_gradient(shard: Shard, product: Tensor, coefficients: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient of the product, [rows, words], the first half of pass T."""
    maximum, log_sum, softmax, at_label, words = coefficients.unbind(0)
    shifted = shard.logits(product).to(shard.wide) - maximum[:, None]
    gradient = (softmax * torch.exp(-log_sum))[:, None] * shifted.exp()
    is_local, number = shard.local_labels(labels)
    label = torch.where(is_local, at_label[:, None], gradient.gather(1, number))
    gradient = gradient.scatter(1, number, label)
    if shard.has_total:
        gradient = gradient + words[:, None]
    return shard.pull_back(product, gradient)


def local_rows(numbers: Tensor, low: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns whether rows belong to a shard, and their numbers there, with a last dimension of 1.

    Rows of other shards get different numbers, so that they do not all write to one row.
    """
    local = numbers.unsqueeze(-1) - low
    inside = (local >= 0) & (local < count)
    return inside, torch.where(inside, local, numbers.unsqueeze(-1).remainder(count))


def _finite(maximum: Tensor) -> Tensor:
    """Returns the maximum, or 0 if all words of a shard are masked by -inf."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)
