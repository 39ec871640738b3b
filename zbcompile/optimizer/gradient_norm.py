"""The norm by which an optimizer clips: the squares of all gradients, added in float64 and rounded once, so that it
does not depend on which rank holds what."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks

CHUNK = 1 << 20  # elements that are squared at once


def norm_of_all(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """The norm, as float32, over the gradients of all processes, of which each passes those that it counts."""
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for gradient in gradients:
        for part in gradient.detach().reshape(-1).split(CHUNK):
            wide = part.double()
            total += wide.dot(wide)
    if ranks.everyone is not None:
        with ranks.watch.position.waiting("the norm of all gradients"):
            dist.all_reduce(total, group=ranks.everyone)
    return total.sqrt().float()
