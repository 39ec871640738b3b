"""Optimizer state that replicas divide, put together and divided again one tensor at a time.

A parameter's whole state is on replica `number % replicas`, `number` being the place of the
parameter among those that are divided; of an optimizer that owns whole parameters, on the owner.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.engine.slice import Slice, memory_of
from zbcompile.errors import PipelineError

Values = dict[str, Any]


def whole_states(states: Mapping[Slice, Values], slices: Sequence[Slice]) -> dict[str, Values]:
    """Returns the state of every parameter whose whole state belongs to this replica, on the CPU.

    `states` are those of this process's slices. All replicas call it.
    """
    described: dict[str, Values] = {}
    for part, state in states.items():
        described.setdefault(part.name, {}).update(
            {key: _described(part, key, value) for key, value in state.items()}
        )
    merged, whole = _exchange(described, slices), dict[str, Values]()
    for name, parts, keeper in _parameters(slices):
        first, rank = parts[0], _rank(parts[0])
        if not first.flat:
            whole |= {name: dict(states[first])} if first.mine and first in states else {}
            continue
        for key, value in merged.get(name, {}).items():
            if isinstance(value, torch.dtype):
                value = _gather(parts, key, value, states)
            if rank == keeper:
                whole.setdefault(name, {})[key] = (
                    value.cpu() if isinstance(value, torch.Tensor) else value
                )
    return whole


def slice_states(whole: Mapping[str, Values], slices: Sequence[Slice]) -> dict[Slice, Values]:
    """Returns the state of this process's slices, out of what `whole_states` returned on every
    replica."""
    described: dict[str, Values] = {}
    for name, parts, keeper in _parameters(slices):
        if parts[0].flat and _rank(parts[0]) == keeper:
            shape = parts[0].parameter.shape
            described[name] = {
                key: (
                    value.dtype
                    if isinstance(value, torch.Tensor) and value.shape == shape and key != "step"
                    else value
                )
                for key, value in whole.get(name, {}).items()
            }
    merged = _exchange(described, slices)
    states: dict[Slice, Values] = {part: {} for part in slices if part.mine}
    for name, parts, keeper in _parameters(slices):
        first = parts[0]
        if not first.flat:
            if first.mine:
                states[first] = dict(whole.get(name, {}))
            continue
        for key, value in merged.get(name, {}).items():
            memory = None
            if isinstance(value, torch.dtype):
                values = whole[name][key] if _rank(first) == keeper else None
                memory = _spread(first, value, values, keeper)
            for part in parts:
                if part.mine:
                    states[part][key] = (
                        value if memory is None else memory[part.begin : part.end].clone()
                    )
    return states


def kept_names(slices: Sequence[Slice]) -> list[str]:
    """Returns the names of the parameters whose whole state belongs to this replica."""
    return [name for name, parts, keeper in _parameters(slices) if _rank(parts[0]) == keeper]


def _parameters(slices: Sequence[Slice]) -> Iterator[tuple[str, list[Slice], int]]:
    """Yields the name, the slices and the keeping replica of each parameter, in the order of
    collectives."""
    parts: dict[str, list[Slice]] = {}
    for part in slices:
        parts.setdefault(part.name, []).append(part)
    for number, (name, slices_of_name) in enumerate(parts.items()):
        size = (
            1 if slices_of_name[0].group is None else dist.get_world_size(slices_of_name[0].group)
        )
        yield (
            name,
            slices_of_name,
            number % size if slices_of_name[0].flat else slices_of_name[0].owner,
        )


def _rank(part: Slice) -> int:
    return 0 if part.group is None else dist.get_rank(part.group)


def _described(part: Slice, key: str, value: Any) -> Any:
    """Returns the dtype of state that is divided as the parameter is; any other value as it is."""
    if not isinstance(value, torch.Tensor) or (
        value.shape != part.tensor.shape and not value.dim()
    ):
        return value.cpu() if isinstance(value, torch.Tensor) else value
    if value.shape != part.tensor.shape and part.flat:
        raise PipelineError(
            f"the optimizer keeps {key} of shape {list(value.shape)} for a part of {part.name} with"
            f" shape {list(part.tensor.shape)}, and a checkpoint cannot put such parts together."
            " Pass zero=0."
        )
    return value.dtype


def _exchange(described: dict[str, Values], slices: Sequence[Slice]) -> dict[str, Values]:
    """Returns the small values and dtypes of all replicas, by parameter and key."""
    merged = {name: dict(values) for name, values in described.items()}
    for group in dict.fromkeys(part.group for part in slices if part.group is not None):
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, described, group=group)
        for name, values in (item for report in reports for item in report.items()):
            merged.setdefault(name, {}).update(values)
    return merged


def _gather(
    parts: Sequence[Slice], key: str, dtype: torch.dtype, states: Mapping[Slice, Values]
) -> torch.Tensor:
    """Returns state in the layout of its parameter, from all owners."""
    parameter, group = parts[0].parameter, parts[0].group
    memory = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
    for part in parts:
        values = memory[part.begin : part.end]
        if part.mine:
            values.copy_(states[part][key].detach())
        if group is not None:
            dist.broadcast(values, group=group, group_src=part.owner)
    return memory.as_strided(parameter.shape, parameter.stride())


def _spread(
    part: Slice, dtype: torch.dtype, values: torch.Tensor | None, keeper: int
) -> torch.Tensor:
    """Returns the elements of whole state in the order of the parameter's memory, from the replica
    that keeps it."""
    like = torch.empty_like(part.parameter, dtype=dtype, requires_grad=False)
    if values is not None:
        like.copy_(values)
    memory = memory_of(like)
    if part.group is not None:
        dist.broadcast(memory, group=part.group, group_src=keeper)
    return memory
