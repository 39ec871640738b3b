"""The norm of all gradients of a pipeline, each parameter counted once, and clipping by it."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.frontend.state_dict import Owner


def total_norm(
    trained: Sequence[str],
    sharded: frozenset[str],
    parameters: Mapping[str, nn.Parameter],
    ranks: Ranks,
    owners: Owner,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """The norm of the gradients of the `trained` parameters, on every rank: bit for bit that of
    `torch.nn.utils.get_total_norm` over the whole model, for the same gradients.

    Each rank contributes the norms of the parameters of which it is the first holder, and zeros for all other ones; so
    the sum over the ranks is the list of all norms in the model's order. Every rank holds different rows of the
    `sharded` parameters, which have a norm each.
    """
    listed = [(name, r) for name in trained for r in (range(ranks.count) if name in sharded else owners(name)[:1])]
    norms = torch.zeros(len(listed), dtype=torch.float32, device=ranks.device)
    for index, (name, rank) in enumerate(listed):
        gradient = parameters[name].grad
        if rank in ranks.local and gradient is not None:
            norms[index] = torch.linalg.vector_norm(gradient, norm_type)
    with ranks.watch.position.waiting("the norm of all gradients"):
        ranks.add_up(norms)
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ranks.watch.known_to_all(
            RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped.")
        )
    return total
