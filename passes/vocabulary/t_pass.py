"""The end of the barrier and T, the second pass of a vocabulary shard: the loss, and the gradients of its rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from zbcompile.passes.vocabulary.exits import Statistics
from zbcompile.passes.vocabulary.loss import Values
from zbcompile.passes.vocabulary.s_t_exponentials import update_exponentials
from zbcompile.passes.vocabulary.shard import Parameters, Shard, Updates, finite, joined, mean_over

Tensor = torch.Tensor
Kept = tuple[Sequence[Tensor], Tensor | None]  # `raw` and `maximum` of what leaves S


class ShardResults(NamedTuple):
    """The results of every shard from all statistics: the loss, `coefficients` [5, tokens] for T (the maximum, log z,
    the factor of softmax, the gradient by the label's logit, the factor of the weights), with one barrier its part of
    the input gradient [tokens, width], and the gradients by the loss's `terms` that are no logits."""

    loss: Tensor
    coefficients: Tensor
    part: Tensor | None
    terms: Tensor


def gather_statistics(shard: Shard, gathered: Tensor, values: Values) -> tuple[Statistics, Tensor]:
    """Those of all words, from `gathered` [shards, statistics, tokens], and the sum of exponentials of every shard over
    the common maximum [shards, tokens]."""
    maxima, z, targets, totals, *means = gathered.unbind(1)
    maximum = maxima.amax(0)
    safe = finite(maximum)
    shares = z * (maxima - safe).exp()
    statistics = Statistics(shares.sum(0).log(), targets.sum(0) - maximum, None, maximum)
    if shard.head.loss.needs_total:
        moved = (finite(maxima) - safe) * _weight_sums(shard, values, z)[:, None]
        statistics = statistics._replace(total=(totals + moved).sum(0))
    if means:
        statistics = statistics._replace(mean=mean_over(safe, maxima, z, means[0]).sum(0) / shares.sum(0))
    return statistics, shares


def combine(
    shard: Shard,
    gathered: Tensor,
    tangent: Tensor,
    kept: Mapping[str, Tensor],
    values: Values,
    terms: Sequence[Tensor] = (),
) -> ShardResults:
    """The end of the barrier: `gathered` [shards, 4, tokens], `tangent` the factor of this microbatch's loss."""
    statistics, shares = gather_statistics(shard, gathered, values)
    loss, (a, b, c), of_terms = _differentiate(shard, statistics, tangent, values, terms)
    at_label = a * torch.expm1(statistics.target - statistics.log_z) + (a + b)
    coefficients = torch.stack([statistics.maximum, statistics.log_z, a, at_label, c])
    if shard.barriers == 2:
        return ShardResults(loss, coefficients, None, of_terms)
    share = a * shares[shard.rank] / shares.sum(0)
    part = share[:, None] * kept["others"] + at_label[:, None] * kept["label_rows"]
    if "total_rows" in kept:
        part = part + c[:, None] * kept["total_rows"]
    return ShardResults(loss, coefficients, part, of_terms)


def _weight_sums(shard: Shard, values: Values, like: Tensor) -> Tensor:
    """Sum of w over the words of every shard [shards]."""
    whole = shard.head.loss.weight_of(values)
    if whole is None:
        return torch.tensor([high - low for low, high in shard.bounds], dtype=like.dtype, device=like.device)
    return torch.stack([whole[low:high].to(like.dtype).sum() for low, high in shard.bounds])


def _differentiate(
    shard: Shard, statistics: Statistics, tangent: Tensor, values: Values, terms: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The loss and its gradients by log_z, target and total, and by `terms`, times `tangent`."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in statistics[:3] if each is not None]
        total = leaves[2] if len(leaves) > 2 else None
        own = [each.detach().requires_grad_() for each in terms]
        (loss,) = shard.head.loss(Statistics(leaves[0], leaves[1], total, statistics.maximum), values, own).values()
        found = torch.autograd.grad(loss, [*leaves, *own], tangent.to(loss.dtype), allow_unused=True)
    zeros = torch.zeros_like(statistics.log_z)
    of_rows = [zeros if each is None else each for each in (*found[: len(leaves)], None)][:3]
    of_terms = [zeros[:1].sum() if each is None else each.to(zeros.dtype) for each in found[len(leaves) :]]
    return loss.detach(), of_rows, torch.stack(of_terms) if of_terms else zeros[:0]


def update(shard: Shard, hidden: Tensor, own: Parameters, coefficients: Tensor, kept: Kept, values: Values) -> Updates:
    """T, tile by tile, from what S kept, or from recomputed logits if it kept nothing."""
    labels = shard.head.loss.label_of(values)
    raw, own_maximum = kept
    if own_maximum is not None:
        return update_exponentials(shard, hidden, own, coefficients, raw, own_maximum, labels)
    part = torch.zeros_like(hidden, dtype=shard.statistics_dtype) if shard.barriers == 2 else None
    weights, biases = [], []
    for number, words in enumerate(shard.tiles()):
        logits = raw[number] if raw else shard.raw_logits(hidden, own, words)
        gradient = _logit_gradient(shard, logits, coefficients, labels, values, words)
        if part is not None:
            part = part + shard.times_weight(gradient, own, words)
        weights.append(gradient.to(hidden.dtype).t() @ hidden)
        biases.append(gradient.sum(0))
    bias = None if own.bias is None else joined(biases, own.bias)
    return Updates(joined(weights, own.weight), bias, part)


def _logit_gradient(
    shard: Shard, raw: Tensor, coefficients: Tensor, labels: Tensor, values: Values, words: slice
) -> Tensor:
    """The gradient by what the output layer makes [tokens, words]."""
    maximum, log_z, a, of_label, c = coefficients.unbind(0)
    y = shard.pointwise(raw)
    shifted = y - finite(maximum)[:, None]
    gradient = (a * torch.exp(-log_z))[:, None] * shifted.exp()
    inside, number = shard.local(labels, words)
    at = number[:, None]
    of_label = torch.where(inside, of_label, gradient.gather(1, at)[:, 0])
    gradient = gradient.scatter(1, at, of_label[:, None])
    if shard.head.loss.needs_total:
        gradient = gradient + c[:, None] * shard.class_weight(values, words, y)
    return shard.pull(raw, gradient)
