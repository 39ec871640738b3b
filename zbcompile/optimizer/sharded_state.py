"""Optimizer state that replicas divide, gathered and scattered one tensor at a time.

The whole state of a parameter is on replica `number % replicas`, `number` being the place of the
parameter among those that are divided; of an optimizer that owns whole parameters, on the owner.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.distributed.transport import as_contiguous
from zbcompile.engine.optimizer_parameters import OptimizerTensor
from zbcompile.engine.zero1 import ShardedBuffer
from zbcompile.errors import PipelineError

Values = dict[str, Any]


def gather_states(
    states: Mapping[OptimizerTensor, Values], buffers: Sequence[ShardedBuffer]
) -> dict[str, Values]:
    """Returns the state, on the CPU, of every parameter whose whole state is on this replica.

    `states` are those of this process. All replicas call it.
    """
    local = {tensor.name: (tensor, state) for tensor, state in states.items()}
    # Of state that is divided as the parameter is, the dtype; all of other values.
    divided = [name for buffer in buffers if buffer.owners is None for name in buffer.parameters]
    layouts = _merge_over_replicas(
        {
            name: {key: _layout(local[name][0], key, v) for key, v in local[name][1].items()}
            for name in divided
            if name in local
        },
        buffers,
    )
    full_states: dict[str, Values] = {}
    for buffer, name, replica in _parameters(buffers):
        is_here = replica == buffer.replica
        if buffer.owners is not None:
            full_states |= {name: dict(local[name][1])} if is_here and name in local else {}
            continue
        for key, value in layouts.get(name, {}).items():
            if isinstance(value, torch.dtype):
                part = local[name][1][key] if name in local else None
                value = _gather(buffer, name, value, part)
            if is_here:
                value = value.cpu() if isinstance(value, torch.Tensor) else value
                full_states.setdefault(name, {})[key] = value
    return full_states


def scatter_states(
    whole: Mapping[str, Values],
    tensors: Sequence[OptimizerTensor],
    buffers: Sequence[ShardedBuffer],
) -> dict[OptimizerTensor, Values]:
    """Returns the state of this process's `tensors` out of what `gather_states` returned on every
    replica."""
    local = {tensor.name: tensor for tensor in tensors}
    layouts: dict[str, Values] = {}
    for buffer, name, replica in _parameters(buffers):
        if buffer.owners is None and replica == buffer.replica:
            shape = buffer.parameters[name].shape
            layouts[name] = {
                key: value.dtype if _has_shape(key, value, shape) else value
                for key, value in whole.get(name, {}).items()
            }
    layouts = _merge_over_replicas(layouts, buffers)
    states: dict[OptimizerTensor, Values] = {tensor: {} for tensor in tensors}
    for buffer, name, replica in _parameters(buffers):
        tensor = local.get(name)
        if buffer.owners is not None:
            if tensor is not None:
                states[tensor] = dict(whole.get(name, {}))
            continue
        for key, value in layouts.get(name, {}).items():
            if isinstance(value, torch.dtype):
                values = whole[name][key] if replica == buffer.replica else None
                value = _scatter(buffer, name, value, values, replica)
            if tensor is not None:
                states[tensor][key] = value
    return states


def names_with_whole_state(buffers: Sequence[ShardedBuffer]) -> list[str]:
    """Returns the names of the parameters whose whole state is on this replica."""
    return [name for buffer, name, replica in _parameters(buffers) if replica == buffer.replica]


def _parameters(buffers: Sequence[ShardedBuffer]) -> Iterator[tuple[ShardedBuffer, str, int]]:
    """Yields every divided parameter with its buffer and the replica of its whole state."""
    pairs = ((buffer, name) for buffer in buffers for name in buffer.parameters)
    for number, (buffer, name) in enumerate(pairs):
        replica = number % buffer.replicas if buffer.owners is None else buffer.owners[name]
        yield buffer, name, replica


def _has_shape(key: str, value: Any, shape: torch.Size) -> bool:
    # A parameter may have the shape of a step: ().
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"


def _layout(tensor: OptimizerTensor, key: str, value: Any) -> Any:
    if _has_shape(key, value, tensor.tensor.shape):
        return value.dtype
    if isinstance(value, torch.Tensor) and value.dim():
        raise PipelineError(
            f"the optimizer keeps {key} of shape {list(value.shape)} for a part of {tensor.name}"
            f" with shape {list(tensor.tensor.shape)}, and a checkpoint cannot put such parts"
            " together. Pass zero=0."
        )
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _merge_over_replicas(
    layouts: Mapping[str, Values], buffers: Sequence[ShardedBuffer]
) -> dict[str, Values]:
    """Returns `layouts` with the entries that other replicas have. All of them call it."""
    merged = {name: dict(values) for name, values in layouts.items()}
    for group in dict.fromkeys(b.group for b in buffers if b.group is not None):
        reports: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, layouts, group=group)
        for report in reports:
            for name, values in report.items():
                merged.setdefault(name, {}).update(values)
    return merged


def _gather(
    buffer: ShardedBuffer, name: str, dtype: torch.dtype, part: torch.Tensor | None
) -> torch.Tensor:
    """Returns the state of a parameter, in the parameter's layout, from all replicas."""
    parameter = buffer.parameters[name]
    flat = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
    for replica, begin, end in buffer.parts(name):
        values = flat[begin:end]
        if replica == buffer.replica and part is not None:
            values.copy_(part.detach())
        if buffer.group is not None:
            dist.broadcast(values, group=buffer.group, group_src=replica)
    return flat.as_strided(parameter.shape, parameter.stride())


def _scatter(
    buffer: ShardedBuffer, name: str, dtype: torch.dtype, values: torch.Tensor | None, source: int
) -> torch.Tensor | None:
    """Returns this replica's part of state that replica `source` has whole; None if it has none."""
    parameter = buffer.parameters[name]
    full_value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if values is not None:
        full_value.copy_(values)
    flat = as_contiguous(full_value).view(-1)
    if buffer.group is not None:
        dist.broadcast(flat, group=buffer.group, group_src=source)
    for replica, begin, end in buffer.parts(name):
        if replica == buffer.replica:
            return flat[begin:end].clone()
    return None
