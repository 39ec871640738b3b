"""The state of an optimizer that replicas hold in parts, under the names of parameters, as if each were whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from zbcompile.distributed.packing import memory_order
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.optimizer.pipeline_optimizer import MASTER, PipelineOptimizer
from zbcompile.optimizer.sharded_parameters import Part, ShardedParameters
from zbcompile.persistence.local_tensors import Corner, Holding, Pieces


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Corner, Corner]]:
    """Offset and size of the fewest boxes, one after the other, that hold the elements from `begin` to `end`.

    >>> list(rectangles((3, 4), 2, 12))
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not shape or begin == end:
        yield from [((), ())] if begin < end else []
        return
    inner = prod(shape[1:])
    row, after = begin // inner, begin % inner
    if after or end - begin < inner:
        stop = min(end, (row + 1) * inner)
        for offset, size in rectangles(shape[1:], after, stop - row * inner):
            yield (row, *offset), (1, *size)
        yield from rectangles(shape, stop, end)
        return
    rows = (end - begin) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from rectangles(shape, begin + rows * inner, end)


def pieces(
    shape: Sequence[int], offset: Sequence[int], local: torch.Tensor, begin: int, values: torch.Tensor
) -> Pieces:
    """What `values` are of a tensor of this shape: the elements from `begin` on of its part at `offset`, which is as
    large as `local` and laid out as it is."""
    order = memory_order(local)
    back = [order.index(i) for i in range(local.ndim)]
    parts, at = {}, 0
    for corner, size in rectangles([local.shape[i] for i in order], begin, begin + values.numel()):
        part = values[at : at + prod(size)].view(size).permute(back)
        parts[tuple(o + corner[i] for o, i in zip(offset, back, strict=True))] = part
        at += prod(size)
    return Pieces.made(shape, values.dtype, parts)


Values = dict[str, Any]


def sharded_values(optimizer: PipelineOptimizer, update: ShardedParameters, holding: Holding) -> Values:
    """The state that this process writes."""
    values: Values = {}
    for tensor, parts in update.parts():
        state = dict(optimizer.state.get(tensor, {}))
        if optimizer.keeps_master(tensor):
            state[MASTER] = tensor.detach()
        for key, value in state.items():
            for part in (part for part in parts if part.writes):
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    values[f"state.{_stored(part, holding)}.{key}"] = _pieces(part, value, holding)
                elif isinstance(value, torch.Tensor) and value.dim():
                    raise PipelineError(
                        f"the optimizer keeps {key} of shape {list(value.shape)} for a part of {part.name} with shape "
                        f"{list(tensor.shape)}, and a checkpoint cannot put such parts together. Save "
                        "optimizer.state_dict() of each rank for the same ranks, or pass zero=0."
                    )
                elif part.begin == 0:
                    values[f"state.{_stored(part, holding)}.{key}"] = value
    return values


def _stored(part: Part, holding: Holding) -> str:
    return holding.name_of(part.shown)


def _pieces(part: Part, values: torch.Tensor, holding: Holding) -> Pieces:
    """This process's part of something as large as its parameter, out of that of its bucket."""
    whole, offset = holding.tensors[_stored(part, holding)], [0] * part.parameter.ndim
    if is_distributed(whole):
        offset = list(whole.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
    own = values if part.at is None else values[part.at : part.at + part.size]
    flat = own.as_strided((part.size,), (1,))
    return pieces(whole.shape, offset, part.parameter, part.begin, flat)


def wanted_state(
    update: ShardedParameters, holding: Holding, keys: Mapping[str, list[str]], saved: Mapping[str, Any]
) -> tuple[Values, Callable[[Values], dict[int, Values]]]:
    """What to read, and a function of what was read: the state of this process's tensors, by number."""
    wanted: Values = {}
    rooms: dict[int, Values] = {}
    members = list(update.parts())
    for number, (tensor, parts) in enumerate(members):
        names = [_stored(part, holding) for part in parts]
        _require_alike(names, [set(keys[name]) for name in names])
        for key in keys[names[0]] if names else ():
            for part, name in zip(parts, names, strict=True):
                described = saved[f"state.{name}.{key}"]
                # a parameter without dimensions is as large as the number of its steps
                if described and key != "step" and described.shape == tuple(holding.tensors[name].shape):
                    room = rooms.setdefault(number, {}).setdefault(key, torch.zeros_like(tensor, dtype=described.dtype))
                    wanted[f"state.{name}.{key}"] = _pieces(part, room, holding)
                else:
                    wanted[f"state.{name}.{key}"] = described and torch.empty(described.shape, dtype=described.dtype)

    def state(values: Values) -> dict[int, Values]:
        return {
            number: {**_single(parts, holding, keys, values, rooms.get(number, {})), **rooms.get(number, {})}
            for number, (_, parts) in enumerate(members)
            if parts and keys[_stored(parts[0], holding)]
        }

    return wanted, state


def _single(
    parts: tuple[Part, ...], holding: Holding, keys: Mapping[str, list[str]], values: Values, rooms: Values
) -> Values:
    """What a bucket has one of, and a checkpoint one for each parameter, such as the number of steps."""
    names = [_stored(part, holding) for part in parts]
    found = {key: [values[f"state.{name}.{key}"] for name in names] for key in keys[names[0]] if key not in rooms}
    for each in found.values():
        _require_alike(names, each)
    return {key: each[0] for key, each in found.items()}


def _require_alike(names: list[str], values: list[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        if value != values[0]:
            raise PipelineError(
                f"the checkpoint has other optimizer state for {name} than for {names[0]} ({value} and {values[0]}), "
                "which replicas hold in one bucket. Put them into different groups=, or load with zero=0."
            )


def members_of(optimizer: PipelineOptimizer, holding: Holding) -> Iterator[tuple[int, str]]:
    """The number of the group of every parameter of this process, and its name."""
    for name, parameter in optimizer.trained.shown.items():
        if name in optimizer.numbers:
            yield optimizer.numbers[name], holding.name_of(parameter)
