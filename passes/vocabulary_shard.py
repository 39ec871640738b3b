"""The vocabulary passes of one shard as functions of tensors (arXiv 2411.05288, algorithms 1 and 2).

S makes logits and statistics of the shard's words; the statistics of all shards are gathered; `combine` turns them into
the loss and a few numbers per token, and with one barrier into the shard's part of the input gradient; T makes the
weight gradient, and with two barriers that part of the input gradient.

The input gradient of one barrier leaves the label's word out of the sum, sum_{j != t} P_j W_j, and adds (P_t - 1) W_t
with P_t - 1 = expm1(log P_t): for a confident token the two differ from P W - W_t by all the digits that bf16 has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from zbcompile.passes.vocabulary_head import VocabularyHead
from zbcompile.passes.vocabulary_loss import Statistics, Values

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shard:
    """What rank `rank` computes: words `bounds[rank]` of the vocabulary.

    `keep` says whether logits wait from S for T or are made again; `tile` is how many words are worked on at a time.
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
        """fp32, or fp64 where the model computes in it."""
        return torch.promote_types(self.head.dtype, torch.float32)

    def tiles(self) -> Iterator[slice]:
        for start in range(0, self.size, self.tile):
            yield slice(start, min(start + self.tile, self.size))


class Parameters(NamedTuple):
    """The shard's rows: `weight` [words, width], `bias` [words]."""

    weight: Tensor
    bias: Tensor | None


class Scan(NamedTuple):
    """What S knows of some words, per token: the maximum, the sum of exponentials, the label's logit where it is among
    them, the weighted sum of logits over the maximum and the sum of these weights; `others` = sum_{j != t} p_j W_j
    [tokens, width] with p = exp(y - maximum) / z."""

    maximum: Tensor
    z: Tensor
    target: Tensor
    total: Tensor
    weights: Tensor | float
    others: Tensor | None


class Scanned(NamedTuple):
    """What leaves S: `statistics` [4, tokens]; `label_rows` is D_t W_t of labels of this shard, `total_rows` is
    sum_j w_j D_j W_j with D the derivative of the elementwise operations; `raw` are the logits before these."""

    statistics: Tensor
    others: Tensor | None
    label_rows: Tensor | None
    total_rows: Tensor | None
    raw: Tensor | None


def _pointwise(shard: Shard, raw: Tensor) -> Tensor:
    """The logits from what the output layer makes, in the dtype of statistics."""
    return reduce(lambda y, step: step(y), shard.head.pointwise, raw.to(shard.statistics_dtype))


def _pull(shard: Shard, raw: Tensor, gradient: Tensor) -> Tensor:
    """The gradient by what the output layer makes, from that by the logits."""
    if not shard.head.pointwise:
        return gradient
    with torch.enable_grad():
        leaf = raw.detach().to(shard.statistics_dtype).requires_grad_()
        return torch.autograd.grad(_pointwise(shard, leaf), leaf, gradient)[0]


def _raw(shard: Shard, hidden: Tensor, own: Parameters, words: slice) -> Tensor:
    dtype = shard.head.dtype
    bias = None if own.bias is None else own.bias[words].to(dtype)
    return F.linear(hidden, own.weight[words].to(dtype), bias)


def _local(shard: Shard, labels: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Whether a token's label is among `words`, and its number there (0 otherwise)."""
    own = labels - (shard.low + words.start)
    inside = (own >= 0) & (own < words.stop - words.start)
    return inside, torch.where(inside, own, 0)


def _finite(maximum: Tensor) -> Tensor:
    """Where no word is alive (a shard without words, columns masked by -inf) the maximum says nothing."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def _class_weight(shard: Shard, values: Values, words: slice, like: Tensor) -> Tensor:
    """w of some words [words]."""
    whole = shard.head.loss.weight_of(values)
    if whole is None:
        return torch.ones(words.stop - words.start, dtype=like.dtype, device=like.device)
    return whole[shard.low + words.start : shard.low + words.stop].to(like.dtype)


def scan(shard: Shard, hidden: Tensor, own: Parameters, values: Values) -> Scanned:
    """S: `hidden` [tokens, width] is the output layer's input."""
    labels = shard.head.loss.label_of(values)
    found: Scan | None = None
    kept = []
    totals = label_rows = None
    if shard.barriers == 1:
        label_rows = _label_rows(shard, hidden, own, labels)
        if shard.head.loss.needs_total:
            totals = torch.zeros_like(hidden, dtype=shard.statistics_dtype)
    for words in shard.tiles():
        raw = _raw(shard, hidden, own, words)
        tile = _scan_tile(shard, raw, own, labels, values, words)
        found = tile if found is None else _merge(found, tile)
        if totals is not None:
            totals = totals + _total_rows(shard, raw, own, values, words)
        kept.append(raw)
    found = found or _nothing(shard, hidden)
    statistics = torch.stack([found.maximum, found.z, found.target, found.total])
    raw_logits = torch.cat(kept, 1) if shard.keep and len(kept) > 1 else kept[0] if shard.keep and kept else None
    return Scanned(statistics, found.others, label_rows, totals, raw_logits)


def _nothing(shard: Shard, hidden: Tensor) -> Scan:
    zeros = torch.zeros(hidden.shape[0], dtype=shard.statistics_dtype, device=hidden.device)
    others = torch.zeros_like(hidden, dtype=shard.statistics_dtype) if shard.barriers == 1 else None
    return Scan(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros, 0.0, others)


def _scan_tile(shard: Shard, raw: Tensor, own: Parameters, labels: Tensor, values: Values, words: slice) -> Scan:
    y = _pointwise(shard, raw)
    inside, number = _local(shard, labels, words)
    maximum = y.amax(1)
    shifted = y - _finite(maximum)[:, None]
    exponentials = shifted.exp()
    z = exponentials.sum(1)
    target = torch.where(inside, y.gather(1, number[:, None])[:, 0], 0.0)
    total, weights = torch.zeros_like(z), torch.zeros_like(z[0])
    if shard.head.loss.needs_total:
        weight = _class_weight(shard, values, words, shifted)
        total, weights = (shifted * weight).sum(1), weight.sum()
    others = None
    if shard.barriers == 1:
        others = _others(shard, raw, exponentials, z, own, (inside, number), words)
    return Scan(maximum, z, target, total, weights, others)


def _others(
    shard: Shard,
    raw: Tensor,
    exponentials: Tensor,
    z: Tensor,
    own: Parameters,
    label: tuple[Tensor, Tensor],
    words: slice,
) -> Tensor:
    """sum_{j != t} p_j D_j W_j [tokens, width]. The division by z comes last, where there are fewest numbers, unless
    fp16 could overflow before."""
    divisor = torch.where(z > 0, z, 1.0)[:, None]
    early = shard.head.dtype == torch.float16
    p = exponentials / divisor if early else exponentials
    inside, at = label[0], label[1][:, None]
    at_label = torch.where(inside, 0.0, p.gather(1, at)[:, 0])
    pulled = _pull(shard, raw, p.scatter(1, at, at_label[:, None]))
    found = _times_weight(shard, pulled, own, words)
    return found if early else found / divisor


def _times_weight(shard: Shard, gradient: Tensor, own: Parameters, words: slice) -> Tensor:
    dtype = shard.head.dtype
    return (gradient.to(dtype) @ own.weight[words].to(dtype)).to(shard.statistics_dtype)


def _merge(one: Scan, other: Scan) -> Scan:
    """Two sets of words as one (a running maximum, as in flash attention)."""
    maximum = torch.maximum(one.maximum, other.maximum)
    safe = _finite(maximum)
    left, right = one.z * (one.maximum - safe).exp(), other.z * (other.maximum - safe).exp()
    z = left + right
    others = None
    if one.others is not None and other.others is not None:
        divisor = torch.where(z > 0, z, 1.0)
        others = (left / divisor)[:, None] * one.others + (right / divisor)[:, None] * other.others
    total = sum(each.total + (_finite(each.maximum) - safe) * each.weights for each in (one, other))
    return Scan(maximum, z, one.target + other.target, total, one.weights + other.weights, others)  # type: ignore


def _label_rows(shard: Shard, hidden: Tensor, own: Parameters, labels: Tensor) -> Tensor:
    """D_t W_t where the label is a word of this shard, zeros elsewhere [tokens, width]."""
    if not shard.size:
        return torch.zeros_like(hidden, dtype=shard.statistics_dtype)
    inside, number = _local(shard, labels, slice(0, shard.size))
    rows = own.weight[number].to(shard.head.dtype)
    scale = inside.to(shard.statistics_dtype)
    if shard.head.pointwise:
        raw = (hidden * rows).sum(1, dtype=shard.statistics_dtype)
        raw = raw if own.bias is None else raw + own.bias[number]
        scale = scale * _pull(shard, raw, torch.ones_like(scale))
    return rows.to(shard.statistics_dtype) * scale[:, None]


def _total_rows(shard: Shard, raw: Tensor, own: Parameters, values: Values, words: slice) -> Tensor:
    weights = _class_weight(shard, values, words, torch.empty(0, dtype=shard.statistics_dtype, device=raw.device))
    if shard.head.pointwise:
        return _times_weight(shard, _pull(shard, raw, weights.expand(raw.shape)), own, words)
    return (weights @ own.weight[words].to(weights.dtype)).expand(raw.shape[0], -1)


class Combined(NamedTuple):
    """What every shard makes of all statistics: the loss, `coefficients` [5, tokens] for T, and with one barrier its
    part of the input gradient [tokens, width]."""

    loss: Tensor
    coefficients: Tensor
    part: Tensor | None


def combine(shard: Shard, gathered: Tensor, tangent: Tensor, kept: Mapping[str, Tensor], values: Values) -> Combined:
    """The end of the barrier: `gathered` [shards, 4, tokens], `tangent` the factor of this microbatch's loss."""
    maxima, z, targets, totals = gathered.unbind(1)
    maximum = maxima.amax(0)
    safe = _finite(maximum)
    shares = z * (maxima - safe).exp()
    statistics = Statistics(shares.sum(0).log(), targets.sum(0) - maximum, None, maximum)
    if shard.head.loss.needs_total:
        moved = (_finite(maxima) - safe) * _weight_sums(shard, values, z)[:, None]
        statistics = statistics._replace(total=(totals + moved).sum(0))
    loss, a, b, c = _differentiate(shard, statistics, tangent, values)
    coefficients = torch.stack([maximum, statistics.log_z, a, b, c])
    if shard.barriers == 2:
        return Combined(loss, coefficients, None)
    at_label = a * torch.expm1(statistics.target - statistics.log_z) + (a + b)
    share = a * shares[shard.rank] / shares.sum(0)
    part = share[:, None] * kept["others"] + at_label[:, None] * kept["label_rows"]
    if "total_rows" in kept:
        part = part + c[:, None] * kept["total_rows"]
    return Combined(loss, coefficients, part)


def _weight_sums(shard: Shard, values: Values, like: Tensor) -> Tensor:
    """Sum of w over the words of every shard [shards]."""
    whole = shard.head.loss.weight_of(values)
    if whole is None:
        return torch.tensor([high - low for low, high in shard.bounds], dtype=like.dtype, device=like.device)
    return torch.stack([whole[low:high].to(like.dtype).sum() for low, high in shard.bounds])


def _differentiate(
    shard: Shard, statistics: Statistics, tangent: Tensor, values: Values
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients by log_z, target and total, times `tangent`."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in statistics[:3] if each is not None]
        total = leaves[2] if len(leaves) > 2 else None
        loss = shard.head.loss(Statistics(leaves[0], leaves[1], total, statistics.maximum), values)
        found = torch.autograd.grad(loss, leaves, tangent.to(loss.dtype), allow_unused=True)
    zeros = torch.zeros_like(statistics.log_z)
    a, b, c = [zeros if each is None else each for each in (*found, None)][:3]
    return loss.detach(), a, b, c


class Updates(NamedTuple):
    """What leaves T: gradients of the shard's rows, and with two barriers its part of the input gradient."""

    weight: Tensor
    bias: Tensor | None
    part: Tensor | None


def update(
    shard: Shard, hidden: Tensor, own: Parameters, coefficients: Tensor, raw: Tensor | None, values: Values
) -> Updates:
    """T, tile by tile: logits kept by S or made again."""
    labels = shard.head.loss.label_of(values)
    part = torch.zeros_like(hidden, dtype=shard.statistics_dtype) if shard.barriers == 2 else None
    weights, biases = [], []
    for words in shard.tiles():
        logits = _raw(shard, hidden, own, words) if raw is None else raw[:, words]
        gradient = _logit_gradient(shard, logits, coefficients, labels, values, words)
        if part is not None:
            part = part + _times_weight(shard, gradient, own, words)
        weights.append(gradient.to(hidden.dtype).t() @ hidden)
        biases.append(gradient.sum(0))
    bias = None if own.bias is None else _joined(biases, own.bias)
    return Updates(_joined(weights, own.weight), bias, part)


def _joined(pieces: list[Tensor], parameter: Tensor) -> Tensor:
    """The gradient of a parameter from those of its tiles; a shard without words has none."""
    if not pieces:
        return torch.zeros_like(parameter)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(parameter.dtype)


def _logit_gradient(
    shard: Shard, raw: Tensor, coefficients: Tensor, labels: Tensor, values: Values, words: slice
) -> Tensor:
    """The gradient by what the output layer makes [tokens, words]."""
    maximum, log_z, a, b, c = coefficients.unbind(0)
    y = _pointwise(shard, raw)
    shifted = y - _finite(maximum)[:, None]
    gradient = (a * torch.exp(-log_z))[:, None] * shifted.exp()
    inside, number = _local(shard, labels, words)
    at = number[:, None]
    of_label = a * torch.expm1(shifted.gather(1, at)[:, 0] - log_z) + (a + b)
    of_label = torch.where(inside, of_label, gradient.gather(1, at)[:, 0])
    gradient = gradient.scatter(1, at, of_label[:, None])
    if shard.head.loss.needs_total:
        gradient = gradient + c[:, None] * _class_weight(shard, values, words, y)
    return _pull(shard, raw, gradient)
