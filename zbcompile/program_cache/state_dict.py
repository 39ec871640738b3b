"""Eager's state dict as a stream of whole tensors, from the ranks that hold them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.vocabulary_parameters import VocabularyShards
from zbcompile.model.model_info import first_names
from zbcompile.model.remote_tensors import local_state_dict

Owners = Callable[[str], tuple[int, ...]]


def stream_state(
    model: nn.Module,
    ranks: Ranks,
    owners: Owners,
    shards: VocabularyShards | None,
    frozen: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yields eager's whole state dict, tensor by tensor on every rank, from the ranks that own
    them. Frozen parameters are left out if `frozen` is False."""
    names = first_names(model)
    excluded = {
        name
        for name, parameter in model.named_parameters()
        if not (frozen or parameter.requires_grad)
    }
    group = None if shards is None else ranks.collective_group()
    for key, value in local_state_dict(model).items():
        name = names.get(key, key)
        if name in excluded:
            continue
        with ranks.watch.position.waiting(key):
            if ranks.group is None:
                tensor = value
            elif shards is not None and group is not None and name in shards.own:
                tensor = shards.gathered(name, group).clone()
            else:
                tensor = _broadcast(value, owners(name)[0], ranks)
        yield key, tensor


def _broadcast(value: Any, owner: int, ranks: Ranks) -> Any:
    if not isinstance(value, torch.Tensor):
        return ranks.gather_here(value)[owner]
    buffer = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
    if not value.is_meta:
        buffer.copy_(value.detach())
    ranks.broadcast(buffer, owner)
    return buffer
