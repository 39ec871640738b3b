"""Optimizer state that replicas divide, gathered and scattered one parameter at a time.

The whole state of a parameter is on replica `number % replicas`, `number` being the place of the
parameter among those that are divided; of an optimizer that owns whole parameters, on the owner.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.distributed.transport import as_contiguous
from zbcompile.engine.optimizer_parameters import OptimizerTensor
from zbcompile.engine.zero1 import ShardedBuffer

Values = dict[str, Any]


def gather_states(
    states: Mapping[OptimizerTensor, Values], buffers: Sequence[ShardedBuffer]
) -> dict[str, Values]:
    """Returns the state, on the CPU, of every parameter whose whole state is on this replica.

    `states` are those of this process. All replicas call it.
    """
    local = {
        tensor.name: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        for tensor, state in states.items()
    }
    full_states: dict[str, Values] = {}
    for buffer, name, replica in _parameters(buffers):
        is_here, parts = replica == buffer.replica, [local.get(name, {})]
        if buffer.owners is None and buffer.group is not None:
            reports: list[Any] | None = [None] * buffer.replicas if is_here else None
            dist.gather_object(parts[0], reports, group=buffer.group, group_dst=replica)
            parts = reports or []
        if is_here:
            full_states[name] = _joined(buffer, name, [part for part in parts if part])
    return full_states


def _joined(buffer: ShardedBuffer, name: str, parts: Sequence[Values]) -> Values:
    """Returns the state of a parameter, in its layout, from the parts in the order of replicas."""
    if buffer.owners is not None or not parts:
        return dict(*parts)
    parameter, state = buffer.parameters[name], dict(parts[0])
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            flat = torch.cat([part[key] for part in parts])
            state[key] = flat.as_strided(parameter.shape, parameter.stride())
    return state


def scatter_states(
    whole: Mapping[str, Values],
    tensors: Sequence[OptimizerTensor],
    buffers: Sequence[ShardedBuffer],
) -> dict[OptimizerTensor, Values]:
    """Returns the state of this process's `tensors` out of what `gather_states` returned on every
    replica."""
    local = {tensor.name: tensor for tensor in tensors}
    states: dict[OptimizerTensor, Values] = {tensor: {} for tensor in tensors}
    for buffer, name, replica in _parameters(buffers):
        state = [whole.get(name, {})]
        if buffer.owners is None:
            parts = _divided(buffer, name, state[0]) if replica == buffer.replica else None
            if buffer.group is None:
                state = parts or []
            else:
                dist.scatter_object_list(state, parts, group=buffer.group, group_src=replica)
        if name in local:
            states[local[name]] = dict(state[0])
    return states


def _divided(buffer: ShardedBuffer, name: str, state: Values) -> list[Values]:
    """Returns the state of each replica's part of a parameter."""
    parameter, parts = buffer.parameters[name], [Values() for _ in range(buffer.replicas)]
    for key, value in state.items():
        flat = None
        # a parameter may have the shape of a step: ()
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
            like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
            flat = as_contiguous(like.copy_(value)).view(-1)
        for replica, begin, end in buffer.parts(name):
            parts[replica][key] = value if flat is None else flat[begin:end].clone()
    return parts


def names_with_whole_state(buffers: Sequence[ShardedBuffer]) -> list[str]:
    """Returns the names of the parameters whose whole state is on this replica."""
    return [name for buffer, name, replica in _parameters(buffers) if replica == buffer.replica]


def _parameters(buffers: Sequence[ShardedBuffer]) -> Iterator[tuple[ShardedBuffer, str, int]]:
    """Yields every divided parameter with its buffer and the replica of its whole state."""
    pairs = ((buffer, name) for buffer in buffers for name in buffer.parameters)
    for number, (buffer, name) in enumerate(pairs):
        replica = number % buffer.replicas if buffer.owners is None else buffer.owners[name]
        yield buffer, name, replica
