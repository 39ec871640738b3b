"""The norm of all gradients, each parameter counted once.

That by which an optimizer clips adds the squares of each gradient, then of all, in float64 and
rounds once, so that it does not depend on which rank holds what. That of `clip_grad_norm_` has the
bits of torch's.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.mesh import Mesh
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.placements import SHARD, Placement, along
from zbcompile.program.program import Program

CHUNK = 1 << 20  # elements that are squared at once


def squares_of(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of a gradient, as float64."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for part in gradient.detach().reshape(-1).split(CHUNK):
        wide = part.double()
        total += wide.dot(wide)
    return total


def begin_sum(
    squares: Iterable[torch.Tensor], ranks: Ranks
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begins to add up the squares of all processes. A process passes the squares of the gradients
    that it counts."""
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for square in squares:
        total += square
    work = (
        dist.all_reduce(total, group=ranks.everyone, async_op=True)
        if ranks.everyone is not None
        else None
    )
    return total, work


def norm_of_all(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """The norm of the gradients of all processes, as float32."""
    total, work = begin_sum(map(squares_of, gradients), ranks)
    if work is not None:
        with ranks.watch.position.waiting("the norm of all gradients"):
            work.wait()
    return total.sqrt().float()


def total_norm(
    program: Program,
    trained: Collection[str],
    rows: frozenset[str],
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Returns on every rank the norm of the gradients of the `trained` among `parameters`. For the
    same gradients it is bit for bit that of `torch.nn.utils.get_total_norm` over the whole model.

    Each rank contributes the norms of the parameters that it is the first to hold, and zeros for
    all others; so the sum over the ranks is the list of all norms in the model's order. A sharded
    parameter has a norm per part: along dimensions of the mesh, and per pipeline rank for the
    output layer in `rows`.
    """
    listed = [
        (name, rank, part)
        for name in (name for name in parameters if name in trained)
        for rank in (range(ranks.count) if name in rows else program.holders(name)[:1])
        for part in range(ranks.mesh.size(*along(program.placement(name), SHARD)))
    ]
    norms = torch.zeros(len(listed), dtype=torch.float32, device=ranks.device)
    for index, (name, rank, part) in enumerate(listed):
        gradient = parameters[name].grad
        if (
            rank in ranks.local
            and gradient is not None
            and _contributes(ranks.mesh, program.placement(name), part)
        ):
            norms[index] = torch.linalg.vector_norm(gradient, norm_type)
    with ranks.watch.position.waiting("the norm of all gradients"):
        if ranks.group is not None:  # of all ranks that train on this batch
            beside = ranks.mesh.group(*ranks.mesh.beside("dp"))
            dist.all_reduce(norms, group=beside or ranks.group)
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ranks.watch.on_all_ranks(
            RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped.")
        )
    return total


def _contributes(mesh: Mesh, placement: Placement, part: int) -> bool:
    """Returns whether this process counts for a part of a parameter, as the first of its replica
    that holds it."""
    split = along(placement, SHARD)
    return mesh.index(*split) == part and mesh.index(*mesh.beside("pp", "dp", *split)) == 0
