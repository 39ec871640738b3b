"""Batches of many lengths, padded to few: every length that a step meets compiles a program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from zbcompile.errors import PipelineError


def buckets(
    lengths: Sequence[int],
    pad: Mapping[str, float | bool],
    collate: Callable[[Any], Any] | None = None,
    dim: int = 1,
) -> Callable[[Any], Any]:
    """A function that pads the tensors of a batch along `dim` to the smallest of `lengths` that holds them: for a loop,
    or with the `collate` that makes a batch of samples as the `collate_fn` of a DataLoader.

    `pad` gives the value for each tensor to be padded, by its name in the batch ("0", "1", ... in a tuple): none is
    guessed, since a label padded with 0 would count in the loss. Other tensors, and what is no tensor, stay. Raises
    PipelineError for a batch that is longer than all `lengths`, and if a name is missing.

    >>> fit = buckets((4, 8), {"input_ids": 0, "labels": -100})
    >>> fit({"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3), "id": 7})["labels"]
    tensor([[   1.,    1.,    1., -100.]])
    """
    sizes = sorted(lengths)
    if not sizes or sizes[0] < 1:
        raise PipelineError(f"buckets: lengths={list(lengths)}; expected at least one length of 1 or more.")

    def fit(batch: Any) -> Any:
        batch = batch if collate is None else collate(batch)
        items = batch.items() if isinstance(batch, Mapping) else zip(map(str, range(len(batch))), batch, strict=True)
        named = dict(items)
        missing = sorted(pad.keys() - named.keys())
        if missing:
            raise PipelineError(f"buckets: pad= names {missing[0]!r}, but the batch has {', '.join(named)}.")
        longest = max((named[name].shape[dim] for name in pad), default=0)
        length = next((size for size in sizes if size >= longest), None)
        if length is None:
            raise PipelineError(f"buckets: a batch of length {longest}, and the longest bucket is {sizes[-1]}.")
        _require_all(named, pad, longest, dim)
        padded = {name: _padded(named[name], length, value, dim) for name, value in pad.items()}
        if isinstance(batch, Mapping):
            return {**batch, **padded}
        return tuple(padded.get(name, value) for name, value in named.items())

    return fit


def _padded(tensor: torch.Tensor, length: int, value: float | bool, dim: int) -> torch.Tensor:
    after = tensor.ndim - 1 - dim % tensor.ndim
    return F.pad(tensor, (0, 0) * after + (0, length - tensor.shape[dim]), value=value)


def _require_all(named: Mapping[str, Any], pad: Mapping[str, Any], length: int, dim: int) -> None:
    """Refuse a tensor that is as long as those that are padded and has no value to be padded with."""
    for name, value in named.items():
        if name not in pad and isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] == length:
            raise PipelineError(
                f"buckets: {name} has length {length} like the tensors of pad=, which does not name it. Add it with "
                "its value: 0 for a mask, -100 for labels."
            )
