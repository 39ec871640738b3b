"""Pads batches of many lengths to a few, since every new length compiles a program."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from zbcompile.errors import PipelineError


def buckets(
    lengths: Sequence[int],
    pad: Mapping[str, float | bool | None],
    collate: Callable[[Any], Any] | None = None,
    dim: int = 1,
) -> Callable[[Any], Any]:
    """A function that pads the tensors of a batch along `dim` to the smallest of `lengths` that holds them: for a loop,
    or with the `collate` that makes a batch of samples as the `collate_fn` of a DataLoader.

    `pad` gives the value for each tensor to be padded, by its name in the batch ("0", "1", ... in a tuple): none is
    guessed, since a label padded with 0 would count in the loss. Other tensors, and what is no tensor, stay; one that
    has the same length in any dimension is refused, unless `pad` gives it None: it stays by decision. The batch keeps
    its type. Raises PipelineError for a batch that is longer than all `lengths`, if a name is missing, and for a value
    that the tensor's dtype does not have.

    >>> fit = buckets((4, 8), {"input_ids": 0, "labels": -100})
    >>> fit({"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3), "id": 7})["labels"]
    tensor([[   1.,    1.,    1., -100.]])
    """
    _require_options(lengths, pad, dim)
    sizes, values = sorted(lengths), {name: value for name, value in pad.items() if value is not None}

    def fit(batch: Any) -> Any:
        batch = batch if collate is None else collate(batch)
        named = _named(batch)
        missing = sorted(pad.keys() - named.keys())
        if missing:
            raise PipelineError(f"buckets: pad= names {missing[0]!r}, but the batch has {', '.join(named)}.")
        for name, value in values.items():
            _require_fit(name, named[name], value, dim)
        longest = max((named[name].shape[dim] for name in values), default=0)
        length = next((size for size in sizes if size >= longest), None)
        if length is None:
            raise PipelineError(f"buckets: a batch of length {longest}, and the longest bucket is {sizes[-1]}.")
        _require_all(named, pad, dim)
        return _replaced(batch, {name: _padded(named[name], length, value, dim) for name, value in values.items()})

    return fit


def _require_options(lengths: Any, pad: Any, dim: Any) -> None:
    listed = isinstance(lengths, Sequence) and not isinstance(lengths, str)
    if not listed or not lengths or not all(type(each) is int and each > 0 for each in lengths):
        raise PipelineError(f"buckets: lengths={lengths!r}; expected at least one length, whole numbers of 1 or more.")
    if not isinstance(pad, Mapping) or not all(v is None or isinstance(v, int | float) for v in pad.values()):
        raise PipelineError(f"buckets: pad={pad!r}; expected a number, or None, for each name of a tensor.")
    if type(dim) is not int:
        raise PipelineError(f"buckets: dim={dim!r}; expected a whole number.")


def _named(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    if not isinstance(batch, tuple | list):
        raise PipelineError(f"buckets: a batch is a {type(batch).__name__}; expected a mapping, a tuple or a list.")
    return dict(zip(map(str, range(len(batch))), batch, strict=True))


def _require_fit(name: str, tensor: Any, value: float | bool, dim: int) -> None:
    """Refuse a tensor that cannot be padded along `dim`, or whose dtype does not have this value."""
    if not isinstance(tensor, torch.Tensor):
        raise PipelineError(f"buckets: {name} is a {type(tensor).__name__}; expected a tensor.")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise PipelineError(f"buckets: {name} has shape {list(tensor.shape)}, which has no dimension {dim} (dim=).")
    try:
        holds = tensor.dtype.is_floating_point or torch.tensor(value, dtype=tensor.dtype).item() == value
    except (RuntimeError, ValueError, OverflowError):  # uint8 has no -100, int64 no nan
        holds = False
    if not holds:
        raise PipelineError(f"buckets: pad= gives {value!r} for {name}, whose dtype {tensor.dtype} has no such value.")


def _padded(tensor: torch.Tensor, length: int, value: float | bool, dim: int) -> torch.Tensor:
    after = tensor.ndim - 1 - dim % tensor.ndim
    return F.pad(tensor, (0, 0) * after + (0, length - tensor.shape[dim]), value=value)


def _replaced(batch: Any, padded: Mapping[str, torch.Tensor]) -> Any:
    """The batch, of the same type, with other tensors."""
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update(padded)
        return made
    if isinstance(batch, Mapping):
        return {**batch, **padded}
    values = [padded.get(str(place), value) for place, value in enumerate(batch)]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _require_all(named: Mapping[str, Any], pad: Mapping[str, float | bool | None], dim: int) -> None:
    """Refuse a tensor that is as long, in any dimension, as one that is padded, and of which `pad` says nothing. The
    first dimension may be that of the rows."""
    padded = [named[name] for name, value in pad.items() if value is not None]
    lengths = {tensor.shape[dim] for tensor in padded}
    rows = {tensor.shape[0] for tensor in padded if dim % tensor.ndim}
    for top, value in named.items():
        for name, tensor in _tensors(top, value) if top not in pad else ():
            same = {size for at, size in enumerate(tensor.shape) if size in lengths and (at or size not in rows)}
            if same:
                raise PipelineError(
                    f"buckets: {name}, of shape {list(tensor.shape)}, has length {min(same)} like the tensors of pad=, "
                    f"which does not name {top}. Add it with its value (0 for a mask, -100 for labels), or with None "
                    f"if it is not to be padded; what has its length elsewhere than in dim={dim} the model should make."
                )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, nested or not."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from (found for key, each in value.items() for found in _tensors(f"{name}.{key}", each))
    elif isinstance(value, tuple | list):
        yield from (found for at, each in enumerate(value) for found in _tensors(f"{name}.{at}", each))
