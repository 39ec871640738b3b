"""S and T of a vocabulary shard if exponentials wait between them instead of logits.

The gradient by the logits is then, except at the label, a factor per token times what S has computed: T multiplies the
narrow operand of its product by that factor, and recomputes no exponential. All logits of the shard exist before the
first exponential, so one maximum serves all tiles and their products are summed by the kernel that makes them.

This is a second form of `s_pass` and `t_pass`, because neither can stand for both (`Shard.keeps_exponentials`).
Theirs would compute every exponential twice here, once in S and once in T, the dearest thing that the two do besides
their products. This one cannot serve a layer in bf16 or fp16, where the exponentials would be rounded to that dtype
before a factor is known, which changes the bits of every gradient; nor a soft cap, a scale or a smoothed loss, whose
gradient is no multiple of the softmax; nor a layer whose logits do not wait for T, of which S has a tile at a time and
so no common maximum.
"""

from collections.abc import Sequence

import torch

from zbcompile.passes.vocabulary.shard import Parameters, ScanResults, Shard, Updates, finite, joined, without_label

Tensor = torch.Tensor


def scan_exponentials(
    shard: Shard, hidden: Tensor, own: Parameters, labels: Tensor, label_rows: Tensor | None
) -> ScanResults:
    """S: `hidden` [tokens, width] is the output layer's input."""
    logits = [shard.raw_logits(hidden, own, words) for words in shard.tiles()]
    maximum = torch.stack([tile.amax(1) for tile in logits]).amax(0)
    over = finite(maximum)[:, None]
    z = target = torch.zeros_like(maximum)
    others = torch.zeros_like(hidden) if shard.barriers == 1 else None
    kept = []
    for tile, words in zip(logits, shard.tiles(), strict=True):
        inside, number = shard.local(labels, words)
        target = target + torch.where(inside, tile.gather(1, number[:, None])[:, 0], 0.0)
        exponentials = (tile - over).exp()
        z = z + exponentials.sum(1)
        kept.append(without_label(exponentials, inside, number))
        if others is not None:
            others = torch.addmm(others, kept[-1], own.weight[words].to(hidden.dtype))
    if others is not None:
        others = others / torch.where(z > 0, z, 1.0)[:, None]
    statistics = torch.stack([maximum, z, target, torch.zeros_like(z)])
    return ScanResults(statistics, others, label_rows, None, tuple(kept), maximum)


def update_exponentials(
    shard: Shard,
    hidden: Tensor,
    own: Parameters,
    coefficients: Tensor,
    kept: Sequence[Tensor],
    own_maximum: Tensor,
    labels: Tensor,
) -> Updates:
    """T of the exponentials `kept` over the shard's `own_maximum` [tokens]."""
    maximum, log_z, a, at_label, _ = coefficients.unbind(0)
    factor = a * torch.exp(own_maximum - finite(maximum) - log_z)
    inside, number = shard.local(labels, slice(0, shard.size))
    of_label = torch.where(inside, at_label, 0.0)
    row = torch.where(inside, number, labels.remainder(shard.size))  # those elsewhere add 0, not all to one row
    scaled = factor[:, None] * hidden
    weight = joined([tile.t() @ scaled for tile in kept], own.weight)
    of_rows = torch.ops.aten.embedding_dense_backward.default(of_label[:, None] * hidden, row, shard.size, -1, False)
    bias = part = None
    if own.bias is not None:
        bias = joined([tile.t() @ factor for tile in kept], own.bias).index_add(0, row, of_label.to(own.bias.dtype))
    if shard.barriers == 2:
        sums = torch.zeros_like(hidden)
        for tile, words in zip(kept, shard.tiles(), strict=True):
            sums = torch.addmm(sums, tile, own.weight[words].to(hidden.dtype))
        part = factor[:, None] * sums + of_label[:, None] * own.weight[row].to(hidden.dtype)
    return Updates(weight + of_rows.to(own.weight.dtype), bias, part)
