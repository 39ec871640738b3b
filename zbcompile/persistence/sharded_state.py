"""The state of an optimizer that replicas hold in parts, under the names of parameters, as if each were whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from zbcompile.distributed.packing import memory_order
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.optimizer.pipeline_optimizer import MASTER, PipelineOptimizer
from zbcompile.persistence.local_tensors import Corner, Holding, Pieces
from zbcompile.runtime.slice import Slice


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


def sharded_values(optimizer: PipelineOptimizer, holding: Holding) -> Values:
    """The state that this process writes."""
    values: Values = {}
    for each in (each for each in optimizer.slices.mine() if each.counts):
        name, tensor = holding.name_of(each.shown), each.tensor
        state = dict(optimizer.state.get(tensor, {}))
        if optimizer.keeps_master(tensor):
            state[MASTER] = tensor.detach()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                values[f"state.{name}.{key}"] = _pieces(each, value, holding)
            elif isinstance(value, torch.Tensor) and value.dim():
                raise PipelineError(
                    f"the optimizer keeps {key} of shape {list(value.shape)} for a part of {each.name} with shape "
                    f"{list(tensor.shape)}, and a checkpoint cannot put such parts together. Save "
                    "optimizer.state_dict() of each rank for the same ranks, or pass zero=0."
                )
            elif each.begin == 0:
                values[f"state.{name}.{key}"] = value
    return values


def parameters_in_parts(values: Mapping[Slice, torch.Tensor], holding: Holding) -> dict[str, Pieces]:
    """What these `values` of slices are of the parameters, by the parameters' names."""
    found: dict[str, Pieces] = {}
    for each, own in values.items():
        made, name = _pieces(each, own, holding), holding.name_of(each.shown)
        parts = {**found[name].parts, **made.parts} if name in found else made.parts
        found[name] = Pieces.made(made.shape, made.dtype, parts)
    return found


def _pieces(own: Slice, values: torch.Tensor, holding: Holding) -> Pieces:
    """What a slice has of something as large as its parameter."""
    whole, offset = holding.tensors[holding.name_of(own.shown)], [0] * own.parameter.ndim
    if is_distributed(whole):
        offset = list(whole.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
    flat = values.as_strided((values.numel(),), (1,))
    return pieces(whole.shape, offset, own.parameter, own.begin, flat)


def wanted_state(
    optimizer: PipelineOptimizer, holding: Holding, keys: Mapping[str, list[str]], saved: Mapping[str, Any]
) -> tuple[Values, Callable[[Values], dict[int, Values]]]:
    """What to read, and a function of what was read: the state of this process's tensors, by number."""
    wanted: Values = {}
    rooms: dict[int, Values] = {}
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    members = [optimizer.slices.of_tensor(tensor) for tensor in tensors]
    names = [holding.name_of(each.shown) for each in members]
    for number, (each, name) in enumerate(zip(members, names, strict=True)):
        rooms[number] = {}
        for key in keys[name]:
            described = saved[f"state.{name}.{key}"]
            # a parameter without dimensions is as large as the number of its steps
            if described and key != "step" and described.shape == tuple(holding.tensors[name].shape):
                rooms[number][key] = torch.zeros_like(each.tensor, dtype=described.dtype)
                wanted[f"state.{name}.{key}"] = _pieces(each, rooms[number][key], holding)
            else:
                wanted[f"state.{name}.{key}"] = described and torch.empty(
                    described.shape, dtype=described.dtype, device="cpu"
                )

    def state(values: Values) -> dict[int, Values]:
        return {
            number: {key: values[f"state.{name}.{key}"] for key in keys[name]} | rooms[number]
            for number, name in enumerate(names)
            if keys[name]
        }

    return wanted, state


def members_of(optimizer: PipelineOptimizer, holding: Holding) -> Iterator[tuple[int, str]]:
    """The number of the group of every parameter of this process, and its name."""
    for name, parameter in optimizer.trained.shown.items():
        if name in optimizer.numbers:
            yield optimizer.numbers[name], holding.name_of(parameter)
