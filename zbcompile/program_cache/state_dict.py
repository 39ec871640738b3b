"""Whole tensors of which several ranks hold parts: eager's state dict as a stream, the rows of a
sharded layer."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.vocabulary_parameters import VocabularyShards
from zbcompile.model.held_elsewhere import state_in_process
from zbcompile.model.model_info import first_names

Owner = Callable[[str], tuple[int, ...]]


def gather_rows(
    ranks: Ranks, shards: VocabularyShards | None, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """The parameters `names` of a sharded output layer, whole; in the model's own memory if it has
    any. All ranks call it."""
    group = ranks.collective_group() if shards is not None else None
    if shards is None or group is None:
        return {}
    with ranks.watch.position.waiting("the rows of the output layer"):
        return {name: shards.gathered(name, group) for name in shards.own if name in names}


def stream_state(
    model: nn.Module,
    ranks: Ranks,
    owners: Owner,
    shards: VocabularyShards | None,
    frozen: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Eager's whole state dict, tensor by tensor on every rank: each comes from the ranks that own
    it. Frozen parameters are left out if `frozen` is False."""
    names = first_names(model)
    left_out = {
        name for name, each in model.named_parameters() if not (frozen or each.requires_grad)
    }
    group = None if shards is None else ranks.collective_group()
    for key, value in state_in_process(model).items():
        name = names.get(key, key)
        if name in left_out:
            continue
        with ranks.watch.position.waiting(key):
            if ranks.group is None:
                found = value
            elif shards is not None and group is not None and name in shards.own:
                found = shards.gathered(name, group).clone()
            else:
                found = _broadcast(value, owners(name)[0], ranks)
        yield key, found


def _broadcast(value: Any, owner: int, ranks: Ranks) -> Any:
    if not isinstance(value, torch.Tensor):
        return ranks.gather_here(value)[owner]
    whole = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
    if not value.is_meta:  # tensors of other ranks stay there
        whole.copy_(value.detach())
    ranks.broadcast(whole, owner)
    return whole
