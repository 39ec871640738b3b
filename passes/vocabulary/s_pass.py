"""S, the first pass of a vocabulary shard: logits, statistics, and with one barrier a part of the input gradient.

The input gradient of one barrier leaves the label's word out of the sum, sum_{j != t} P_j W_j, and adds (P_t - 1) W_t
with P_t - 1 = expm1(log P_t): for a confident token the two differ from P W - W_t by all the digits that bf16 has.

Words are worked on tile by tile with a running maximum (as in flash attention), so that what S needs besides the logits
does not grow with the vocabulary.
"""

from typing import NamedTuple

import torch

from zbcompile.passes.vocabulary.loss import Values
from zbcompile.passes.vocabulary.s_t_exponentials import scan_exponentials
from zbcompile.passes.vocabulary.shard import Parameters, ScanResults, Shard, finite, mean_over, without_label

Tensor = torch.Tensor
Label = tuple[Tensor, Tensor]  # see `Shard.local`


class Scan(NamedTuple):
    """S's partial results for some of the words, per token: the maximum, the sum of exponentials, the label's logit if
    it is among them, the weighted sum of logits over the maximum and the sum of these weights; `mean`, for entropies,
    is that sum with the exponentials as weights. With one barrier `others` is sum_{j != t} p_j D_j W_j [tokens, width],
    p = exp(y - maximum) / z and D the derivative of the elementwise operations, and `total_rows` sum_j w_j D_j W_j."""

    maximum: Tensor
    z: Tensor
    target: Tensor
    total: Tensor
    weights: Tensor
    others: Tensor | None
    total_rows: Tensor | None
    mean: Tensor | None = None


def scan(shard: Shard, hidden: Tensor, own: Parameters, values: Values) -> ScanResults:
    """S: `hidden` [tokens, width] is the output layer's input."""
    labels = shard.head.loss.label_of(values)
    label_rows = _label_rows(shard, hidden, own, labels) if shard.barriers == 1 else None
    if shard.keeps_exponentials:
        return scan_exponentials(shard, hidden, own, labels, label_rows)
    found: Scan | None = None
    kept = []
    for words in shard.tiles():
        raw = shard.raw_logits(hidden, own, words)
        kept += [raw] if shard.keep else []
        tile = _scan_tile(shard, raw, own, labels, values, words)
        found = tile if found is None else _merge(found, tile)
    found = found or _nothing(shard, hidden)
    means = [] if found.mean is None else [found.mean]
    statistics = torch.stack([found.maximum, found.z, found.target, found.total, *means])
    return ScanResults(statistics, found.others, label_rows, found.total_rows, tuple(kept))


def _nothing(shard: Shard, hidden: Tensor) -> Scan:
    zeros = torch.zeros(hidden.shape[0], dtype=shard.statistics_dtype, device=hidden.device)
    rows = torch.zeros_like(hidden, dtype=shard.statistics_dtype) if shard.barriers == 1 else None
    totals = rows if shard.head.loss.needs_total else None
    mean = zeros if shard.head.loss.needs_mean else None
    return Scan(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros, zeros.sum(), rows, totals, mean)


def _scan_tile(shard: Shard, raw: Tensor, own: Parameters, labels: Tensor, values: Values, words: slice) -> Scan:
    y = shard.pointwise(raw)
    inside, number = shard.local(labels, words)
    maximum = y.amax(1)
    shifted = y - finite(maximum)[:, None]
    exponentials = shifted.exp()
    z = exponentials.sum(1)
    target = torch.where(inside, y.gather(1, number[:, None])[:, 0], 0.0)
    total, weights = torch.zeros_like(z), torch.zeros_like(z[0])
    if shard.head.loss.needs_total:
        weight = shard.class_weight(values, words, shifted)
        total, weights = (shifted * weight).sum(1), weight.sum()
    if shard.barriers != 1:
        mean = None
        if shard.head.loss.needs_mean:  # sum_j exp(y_j - maximum) (y_j - maximum); words masked by -inf add nothing
            mean = torch.where(exponentials == 0, 0.0, exponentials * shifted).sum(1)
        return Scan(maximum, z, target, total, weights, None, None, mean)
    others = _others(shard, raw, exponentials, z, own, (inside, number), words)
    total_rows = _total_rows(shard, raw, own, values, words) if shard.head.loss.needs_total else None
    return Scan(maximum, z, target, total, weights, others, total_rows)


def _others(
    shard: Shard, raw: Tensor, exponentials: Tensor, z: Tensor, own: Parameters, label: Label, words: slice
) -> Tensor:
    """sum_{j != t} p_j D_j W_j [tokens, width], divided by z last, on the fewest numbers, unless fp16 overflows."""
    divisor = torch.where(z > 0, z, 1.0)[:, None]
    early = shard.head.dtype == torch.float16
    p = exponentials / divisor if early else exponentials
    pulled = shard.pull(raw, without_label(p, *label))
    found = shard.times_weight(pulled, own, words)
    return found if early else found / divisor


def _merge(one: Scan, other: Scan) -> Scan:
    """Two sets of words as one (a running maximum, as in flash attention)."""
    maximum = torch.maximum(one.maximum, other.maximum)
    safe = finite(maximum)
    left, right = one.z * (one.maximum - safe).exp(), other.z * (other.maximum - safe).exp()
    z = left + right
    others = None
    if one.others is not None and other.others is not None:
        divisor = torch.where(z > 0, z, 1.0)
        others = (left / divisor)[:, None] * one.others + (right / divisor)[:, None] * other.others
    totals = [each.total + (finite(each.maximum) - safe) * each.weights for each in (one, other)]
    total_rows = None
    if one.total_rows is not None and other.total_rows is not None:
        total_rows = one.total_rows + other.total_rows
    mean = None
    if one.mean is not None and other.mean is not None:
        mean = mean_over(safe, one.maximum, one.z, one.mean) + mean_over(safe, other.maximum, other.z, other.mean)
    target, weights = one.target + other.target, one.weights + other.weights
    return Scan(maximum, z, target, totals[0] + totals[1], weights, others, total_rows, mean)


def _label_rows(shard: Shard, hidden: Tensor, own: Parameters, labels: Tensor) -> Tensor:
    """D_t W_t if the label is a word of this shard, else zeros [tokens, width]."""
    if not shard.size:
        return torch.zeros_like(hidden, dtype=shard.statistics_dtype)
    inside, number = shard.local(labels, slice(0, shard.size))
    rows = own.weight[number].to(shard.head.dtype)
    scale = inside.to(shard.statistics_dtype)
    if shard.head.pointwise:
        raw = (hidden * rows).sum(1, dtype=shard.statistics_dtype)
        raw = raw if own.bias is None else raw + own.bias[number]
        scale = scale * shard.pull(raw, torch.ones_like(scale))
    return rows.to(shard.statistics_dtype) * scale[:, None]


def _total_rows(shard: Shard, raw: Tensor, own: Parameters, values: Values, words: slice) -> Tensor:
    weights = shard.class_weight(values, words, torch.empty(0, dtype=shard.statistics_dtype, device=raw.device))
    if shard.head.pointwise:
        return shard.times_weight(shard.pull(raw, weights.expand(raw.shape)), own, words)
    return (weights @ own.weight[words].to(weights.dtype)).expand(raw.shape[0], -1)
