"""Operations whose result has as many rows as the values of inputs say, such as `x[mask]`.

How many there are is a question (`zbcompile.passes.capture.questions`); once it is answered, operations of fixed shape
compute the same bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# A whole number that a function makes of a tensor; None if it depends on more than inputs
Count = Callable[[Callable[[Tensor], Tensor], Tensor], int | None]


class _UnknownNumber(Exception):
    """The number depends on more than inputs."""


def with_known_size(function: Any, args: Any, kwargs: Mapping[str, Any], count: Count) -> Any:
    """The result of a call; NotImplemented if its shape does not depend on values, or on those of more than inputs,
    so that torch computes it as ever."""
    make = _MAKERS.get(function)
    if make is None or "out" in kwargs or (function is torch.where and len(args) + len(kwargs) > 1):
        return NotImplemented

    def known(tensor: Tensor, number_of: Callable[[Tensor], Tensor] = torch.count_nonzero) -> int:
        number = count(number_of, tensor)
        if number is None:
            raise _UnknownNumber
        return number

    try:
        return make(known, *args, **kwargs)
    except _UnknownNumber:
        return NotImplemented


_Known = Callable[..., int]


def _rows(known: _Known, input: Tensor) -> Tensor:
    return torch.nonzero_static(input, size=known(input))


def _nonzero(known: _Known, input: Tensor, as_tuple: bool = False) -> Any:
    at_least_one = input.reshape(1) if as_tuple and input.dim() == 0 else input
    rows = _rows(known, at_least_one)
    return rows.unbind(1) if as_tuple else rows


def _item(known: _Known, tensor: Tensor, index: Any) -> Any:
    indices = _without_masks(known, tensor, index)
    return NotImplemented if indices is None else tensor[indices]


def _set_item(known: _Known, tensor: Tensor, index: Any, value: Any) -> Any:
    """Assign at the places of a mask. Only the gradient of `value` has a shape that depends on the mask."""
    if not isinstance(value, Tensor) or not value.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    indices = _without_masks(known, tensor, index)
    if indices is None:
        return NotImplemented
    tensor[indices] = value
    return None


def _without_masks(known: _Known, tensor: Tensor, index: Any) -> tuple[Any, ...] | None:
    """The index with each mask replaced by the places at which it is true, as eager does; None if it has no mask, or a
    mask that does not fit."""
    indices = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, indices)) or not _fit(tensor, indices):
        return None
    found: list[Any] = []
    for each in indices:
        found.extend(_nonzero(known, each, as_tuple=True) if _is_mask(each) else (each,))
    return tuple(found)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _fit(tensor: Tensor, indices: tuple[Any, ...]) -> bool:
    """Whether each mask has the shape of the dimensions that it indexes; eager refuses others."""
    taken = [each.dim() if _is_mask(each) else int(not (each is None or isinstance(each, bool))) for each in indices]
    place = 0
    for each, dimensions in zip(indices, taken, strict=True):
        if each is Ellipsis:
            place += tensor.dim() - (sum(taken) - 1)
            continue
        if _is_mask(each) and tensor.shape[place : place + dimensions] != each.shape:
            return False
        place += dimensions
    return True


def _masked_select(known: _Known, input: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return _item(known, input.expand(shape), mask.expand(shape))  # type: ignore[no-any-return]


def _unique_consecutive(
    known: _Known, input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """`torch.unique_consecutive` of integers. Floats are left to torch: a NaN differs from itself."""
    if dim is not None or input.is_floating_point() or input.numel() == 0:
        return NotImplemented
    flat = input.reshape(-1)
    begins = torch.cat((flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]))
    first = _rows(known, begins)[:, 0]
    results = [flat[first]]
    if return_inverse:
        results.append((begins.cumsum(0) - 1).reshape(input.shape))
    if return_counts:
        results.append(torch.cat((first[1:], first.new_full((1,), len(flat)))) - first)
    return tuple(results) if len(results) > 1 else results[0]


def _repeat_interleave(
    known: _Known, input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repetitions of rows, or of their numbers, whose sum is the number of rows that there are then."""
    counts = input if repeats is None else repeats
    if output_size is not None or not isinstance(counts, Tensor):
        return NotImplemented
    if repeats is None:
        return torch.repeat_interleave(counts, output_size=known(counts, torch.sum))
    rows = input.numel() if dim is None else input.shape[dim]
    return torch.repeat_interleave(input, repeats, dim, output_size=known(repeats.expand(rows), torch.sum))


def _arange(known: _Known, *bounds: Any, **options: Any) -> Any:
    """`torch.arange` with whole numbers in tensors, whose values it would read."""
    given = [each for each in bounds if isinstance(each, Tensor)]
    if not given or any(each.is_floating_point() for each in given):
        return NotImplemented
    return torch.arange(*(known(each, torch.sum) if isinstance(each, Tensor) else each for each in bounds), **options)


def _tensor(known: _Known, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """`torch.tensor` of a list of numbers in tensors, whose values it would read. Where they are does not count."""
    given = tuple(data) if isinstance(data, list | tuple) else ()
    kinds = {each.dtype if isinstance(each, Tensor) and not each.ndim else None for each in given}
    if options or len(kinds) != 1 or None in kinds:
        return NotImplemented
    return torch.stack(given).detach().to(device or torch.get_default_device(), dtype)


_MAKERS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.nonzero, Tensor.nonzero), _nonzero),
    **dict.fromkeys((torch.argwhere, Tensor.argwhere), _rows),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _masked_select),
    **dict.fromkeys((torch.unique_consecutive, Tensor.unique_consecutive), _unique_consecutive),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeat_interleave),
    torch.arange: _arange,
    torch.tensor: _tensor,
    torch.where: lambda known, condition: _nonzero(known, condition, as_tuple=True),
    Tensor.__getitem__: _item,
    Tensor.__setitem__: _set_item,
}
