"""The norm of all gradients of a pipeline, each parameter counted once, and clipping by it."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from zbcompile.distributed.mesh import Mesh
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.placements import SHARD, Placement, along
from zbcompile.program.program import Program


def total_norm(
    program: Program,
    trained: Collection[str],
    rows: frozenset[str],
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """The norm of the gradients of the `trained` among `parameters`, on every rank: bit for bit that of
    `torch.nn.utils.get_total_norm` over the whole model, for the same gradients.

    Each rank contributes the norms of the parameters of which it is the first holder, and zeros for all other ones; so
    the sum over the ranks is the list of all norms in the model's order. What is sharded has a norm per part: along
    dimensions of the mesh, and the output layer in `rows` of which every pipeline rank holds others.
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
        if rank in ranks.local and gradient is not None and _contributes(ranks.mesh, program.placement(name), part):
            norms[index] = torch.linalg.vector_norm(gradient, norm_type)
    with ranks.watch.position.waiting("the norm of all gradients"):
        ranks.add_up(norms)
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ranks.watch.known_to_all(
            RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped.")
        )
    return total


def _contributes(mesh: Mesh, placement: Placement, part: int) -> bool:
    """Whether this process speaks for a part of a parameter: the first of those that hold it, in its replica."""
    split = along(placement, SHARD)
    return mesh.index(*split) == part and mesh.index(*mesh.beside("pp", "dp", *split)) == 0
