"""The state of an optimizer that replicas hold in parts, under the names of parameters, as if each were whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """`values` as pieces of a tensor of this shape. They are the elements from `begin` on of the part at `offset`,
    which has the size and the memory layout of `local`."""
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
    """The optimizer's state that this process writes."""
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


def _pieces(own: Slice, values: torch.Tensor, holding: Holding) -> Pieces:
    """`values` of a slice as pieces of a tensor as large as its parameter."""
    whole, offset = holding.tensors[holding.name_of(own.shown)], [0] * own.parameter.ndim
    if is_distributed(whole):
        offset = list(whole.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
    flat = values.as_strided((values.numel(),), (1,))
    return pieces(whole.shape, offset, own.parameter, own.begin, flat)


@dataclass(frozen=True)
class ParameterState:
    """The saved state of one parameter while it is being loaded. `room` says what to read, by key: an empty tensor,
    None for a value that is no tensor, or this process's part of an entry that is divided. `own` has the plain tensor
    of that part's memory, which is the entry once `room` has been read."""

    name: str
    room: Values
    own: Values

    @property
    def wanted(self) -> Values:
        """What to read, by the checkpoint's names."""
        return {f"state.{self.name}.{key}": room for key, room in self.room.items()}

    def loaded(self, values: Values) -> Values:
        """The state by key, after `values` were read."""
        return {key: self.own.get(key, values[f"state.{self.name}.{key}"]) for key in self.room}


def state_of_slice(own: Slice, holding: Holding, keys: Sequence[str], saved: Mapping[str, Any]) -> ParameterState:
    """Room for the entries `keys` of a slice's state; `saved` describes them by their names."""
    state = ParameterState(holding.name_of(own.shown), {}, {})
    whole = tuple(holding.tensors[state.name].shape)
    for key in keys:
        described = saved[f"state.{state.name}.{key}"]
        # a parameter without dimensions is as large as the number of its steps
        if described and key != "step" and described.shape == whole:
            state.own[key] = torch.zeros_like(own.tensor, dtype=described.dtype)
            state.room[key] = _pieces(own, state.own[key], holding)
        else:
            state.room[key] = described and torch.empty(described.shape, dtype=described.dtype, device="cpu")
    return state


def members_of(optimizer: PipelineOptimizer, holding: Holding) -> Iterator[tuple[int, str]]:
    """The number of the group of every parameter of this process, and its name."""
    for name, parameter in optimizer.trained.shown.items():
        if name in optimizer.numbers:
            yield optimizer.numbers[name], holding.name_of(parameter)
