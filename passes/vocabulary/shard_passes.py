"""The passes of one vocabulary shard, as functions of tensors.

S computes the logits of the shard's words and their statistics. STATS combines the statistics of
all shards into the loss and its gradient by row. T computes the gradients of the shard's rows of
the weight. The input gradient is summed over shards behind STATS (one barrier) or T (two), as in
algorithms 2 and 1 of arXiv:2411.05288. The softmax of all words is that of the shard's words times
one number per row, the shard's share.

With one barrier S multiplies softmax and weight before it knows the shares. It leaves the label's
word out, and STATS adds (P_t - 1) W_t with P_t - 1 = expm1(log P_t): for a confident token the two
products differ by all the digits of bfloat16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.gpu import is_gpu
from zbcompile.passes.vocabulary.row_loss import Statistics


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

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the input gradient that S computes."""
        count = 2 + self.has_total if self.barriers == 1 else 0
        return ("others", "label_rows", "total_rows")[:count]

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

    def times_weight(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns gradient [rows, words] times weight, a part of the input gradient.

        The factors have the model's dtype. Parts of several shards may cancel, so they are wide.
        """
        factor, rows = gradient.to(self.dtype), weight.to(self.dtype)
        if self.dtype != self.wide and is_gpu(rows.device):
            return torch.mm(factor, rows, out_dtype=self.wide)
        return factor.to(self.wide) @ rows.to(self.wide)


def scan(
    shard: Shard, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> dict[str, Tensor]:
    """Pass S. Returns what STATS or T needs, by name.

    * statistics, [3 or 4, rows], of this shard's words: the maximum, the sum of exponentials
      relative to it, the label's logit and perhaps the sum of logits
    * product, [rows, words], of a shard with words
    * with one barrier, [rows, width] each: `others`, the sum of softmax times weight over all words
      but the label, `label_rows`, the weight of a label of this shard, and perhaps `total_rows`,
      the gradient of the sum of logits
    """
    lowest = torch.finfo(shard.dtype).min  # no maximum is -inf, so no softmax is NaN
    if not shard.words:
        zeros = hidden.new_zeros((3 + shard.has_total, len(hidden)), dtype=shard.wide)
        parts = dict.fromkeys(shard.parts, torch.zeros_like(hidden, dtype=shard.wide))
        return {"statistics": torch.cat([zeros[:1] + lowest, zeros[1:]]), **parts}
    bias = None if bias is None else bias.to(shard.dtype).clamp(min=lowest)
    product = F.linear(hidden, weight.to(shard.dtype), bias)
    logits = shard.logits(product).to(shard.wide)
    is_local, number = local_rows(labels, shard.low, shard.words)
    probabilities = logits.softmax(1)  # of the largest logit: one over the sum
    label = torch.where(is_local, logits.gather(1, number), 0.0).squeeze(1)
    total = [logits.sum(1)] if shard.has_total else []
    statistics = [logits.amax(1), 1 / probabilities.amax(1), label, *total]
    results = {"statistics": torch.stack(statistics), "product": product}
    if "others" in shard.parts:
        at_label = torch.where(is_local, 0.0, probabilities.gather(1, number))
        pulled = shard.pull_back(product, probabilities.scatter_(1, number, at_label))
        results["others"] = shard.times_weight(pulled, weight)
        slope = shard.pull_back(product.gather(1, number), is_local.to(shard.wide)).to(shard.wide)
        results["label_rows"] = slope * weight[number.squeeze(1)].to(shard.dtype).to(shard.wide)
    if "total_rows" in shard.parts:
        ones = shard.pull_back(product, torch.ones_like(logits))
        results["total_rows"] = shard.times_weight(ones, weight)
    return results


def combine(shard: Shard, gathered: Tensor) -> tuple[Statistics, Tensor]:
    """Returns the statistics of all words, and this shard's share of the softmax, [rows]."""
    maxima, sums, labels, *totals = gathered.unbind(1)
    maximum = maxima.amax(0)
    parts = sums * (maxima - maximum).exp()
    summed = parts.sum(0)
    total = reduce(torch.add, totals, torch.zeros_like(maxima)).sum(0)
    total = total - shard.bounds[-1][1] * maximum
    label = labels.sum(0) - maximum
    return Statistics(maximum, summed.log(), label, total), parts[shard.rank] / summed


def coefficients_of(statistics: Statistics, derivatives: Sequence[Tensor], share: Tensor) -> Tensor:
    """Returns what T needs of every row, [3, rows]: the factor of the shard's softmax, the gradient
    at the label, and the gradient at every word."""
    softmax, label, words = derivatives
    at_label = softmax * torch.expm1(statistics.label - statistics.log_sum) + (softmax + label)
    return torch.stack([softmax * share, at_label, words])


def input_gradient(shard: Shard, coefficients: Tensor, gradient: Mapping[str, Tensor]) -> Tensor:
    """Returns this shard's part of the input gradient from what S found, [rows, width]."""
    pairs = zip(coefficients.unbind(0), shard.parts, strict=False)
    return reduce(torch.add, [rows[:, None] * gradient[name] for rows, name in pairs])


def logit_gradient(shard: Shard, product: Tensor, coefficients: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient of the product, [rows, words], the first half of pass T."""
    softmax, at_label, words = coefficients[:, :, None].unbind(0)
    gradient = shard.logits(product).to(shard.wide).softmax(1).mul_(softmax)
    is_local, number = local_rows(labels, shard.low, shard.words)
    label = torch.where(is_local, at_label, gradient.gather(1, number))
    gradient = gradient.scatter_(1, number, label)
    return shard.pull_back(product, gradient.add_(words) if shard.has_total else gradient)


def local_rows(numbers: Tensor, low: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns whether rows belong to a shard, and their numbers there, with a last dimension of 1.

    Rows of other shards get different numbers, so that they do not all write to one row.
    """
    local = numbers.unsqueeze(-1) - low
    inside = (local >= 0) & (local < count)
    return inside, torch.where(inside, local, numbers.unsqueeze(-1).remainder(count))
