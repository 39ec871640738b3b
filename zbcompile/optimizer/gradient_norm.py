"""The norm by which an optimizer clips: the squares of each gradient, then of all, are added in float64 and rounded
once, so that it does not depend on which rank holds what."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks

CHUNK = 1 << 20  # elements that are squared at once


def squares_of(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of a gradient, as float64."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for part in gradient.detach().reshape(-1).split(CHUNK):
        wide = part.double()
        total += wide.dot(wide)
    return total


def begin_sum(squares: Iterable[torch.Tensor], ranks: Ranks) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to add the squares of all processes, of which each passes those of the gradients that it counts."""
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for each in squares:
        total += each
    work = dist.all_reduce(total, group=ranks.everyone, async_op=True) if ranks.everyone is not None else None
    return total, work


def norm_of_all(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """The norm, as float32, over the gradients of all processes."""
    total, work = begin_sum(map(squares_of, gradients), ranks)
    if work is not None:
        with ranks.watch.position.waiting("the norm of all gradients"):
            work.wait()
    return as_norm(total)


def as_norm(squares: torch.Tensor) -> torch.Tensor:
    """The norm, rounded to float32."""
    return squares.sqrt().float()
