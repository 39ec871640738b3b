"""The norm of all gradients of a pipeline, each parameter counted once, and clipping by it."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.frontend.state_dict import Owner
from zbcompile.runtime.engine import Distributed, Engine


def total_norm(
    trained: Sequence[str],
    sharded: frozenset[str],
    parameters: Mapping[str, nn.Parameter],
    engine: Engine,
    owners: Owner,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """The norm of the gradients of the `trained` parameters, on every rank: bit for bit that of
    `torch.nn.utils.get_total_norm` over the whole model, for the same gradients.

    Each rank contributes the norms of the parameters that it holds first, the others' are zero in its list; so the sum
    over the ranks is the list of all norms in the model's order. Of the `sharded` parameters every rank holds rows of
    its own, which have a norm each.
    """
    listed = [(name, r) for name in trained for r in (range(engine.ranks) if name in sharded else owners(name)[:1])]
    norms = torch.zeros(len(listed), dtype=torch.float32, device=engine.device)
    for index, (name, rank) in enumerate(listed):
        gradient = parameters[name].grad
        if rank in engine.local and gradient is not None:
            norms[index] = torch.linalg.vector_norm(gradient, norm_type)
    if isinstance(engine, Distributed):
        with engine.watch.position.waiting("the norm of all gradients"):
            dist.all_reduce(norms, group=engine.group)
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise engine.watch.known_to_all(
            RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped.")
        )
    return total
