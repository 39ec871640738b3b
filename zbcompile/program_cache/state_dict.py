"""State dicts: eager's keys, this rank's share or the whole."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.held_elsewhere import state_in_process
from zbcompile.passes.capture.export import first_names
from zbcompile.program.program import Program
from zbcompile.runtime.vocabulary_parameters import VocabularyShards

Owner = Callable[[str], tuple[int, ...]]


def owned_parameters(model: nn.Module, ranks: Ranks, owners: Owner) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of this process's ranks in eager's order, tied ones once under their first name."""
    for name, parameter in model.named_parameters():
        if set(owners(name)) & set(ranks.local):
            yield name, parameter


def own_state(model: nn.Module, ranks: Ranks, owners: Owner) -> dict[str, Any]:
    """The part of eager's state dict whose tensors live on this process's ranks, tied parameters under every name."""
    names = first_names(model)
    full = state_in_process(model)
    return {key: value for key, value in full.items() if set(owners(names.get(key, key))) & set(ranks.local)}


def share_state(model: nn.Module, ranks: Ranks, program: Program, shards: VocabularyShards | None) -> dict[str, Any]:
    """As `own_state`; the rows of a sharded output layer are DTensors."""
    state = own_state(model, ranks, program.holders)
    if shards is None or ranks.group is None:
        return state
    return shards.sharded_state(state, program.model.names, ranks.group)


def gather_rows(ranks: Ranks, shards: VocabularyShards | None, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The parameters `names` of a sharded output layer, whole, in the model's own if these have memory; collective."""
    group = ranks.collective_group() if shards is not None else None
    if shards is None or group is None:
        return {}
    with ranks.watch.position.waiting("the rows of the output layer"):
        return {name: shards.gathered(name, group) for name in shards.own if name in names}


def stream_state(
    model: nn.Module, ranks: Ranks, owners: Owner, shards: VocabularyShards | None, frozen: bool = True
) -> Iterator[tuple[str, Any]]:
    """Eager's whole state dict, tensor by tensor on every rank: each comes from the ranks that own it. Frozen
    parameters are left out if `frozen` is False."""
    names = first_names(model)
    left_out = {name for name, each in model.named_parameters() if not (frozen or each.requires_grad)}
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


def load_state(model: nn.Module, ranks: Ranks, owners: Owner, state: Mapping[str, Any]) -> None:
    """Copy this process's share of a full state dict into the model, in place.

    Strict: raises PipelineError, before anything is copied, for keys that eager's state dict lacks or has in addition,
    and for tensors of another shape.
    """
    target = state_in_process(model)
    _check_keys(target, state)
    names = first_names(model)
    with torch.no_grad():
        for key, value in target.items():
            if isinstance(value, torch.Tensor) and set(owners(names.get(key, key))) & set(ranks.local):
                value.copy_(state[key])


def _check_keys(target: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(target) - set(state)), sorted(set(state) - set(target))
    if missing or unexpected:
        raise PipelineError(
            f"the state dict does not fit the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}. load_state_dict takes the full dict, as model.state_dict() or "
            "pipe.state_dict(full=True) makes it."
        )
    for key, value in target.items():
        if isinstance(value, torch.Tensor) and value.shape != state[key].shape:
            raise PipelineError(
                f"{key} has shape {list(state[key].shape)} in the state dict and {list(value.shape)} in the model."
            )
