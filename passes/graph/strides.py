"""Strides at a boundary. A value that crosses keeps the strides that eager gives it, because
kernels, and with them the last bits, depend on strides.

A slice has gaps between its rows and an expanded tensor repeats its elements. Messages are packed,
and the receiver restores the strides. Without `exact` the packed form is also what
the next stage works on.
"""

from functools import lru_cache

import torch

from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.storage import byte_range

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def is_dense(value: torch.Tensor) -> bool:
    """Returns True if the elements fill a block of memory without gaps or overlap, in any order of
    dimensions."""
    return torch.empty_like(value, device="meta").stride() == value.stride()


@lru_cache
def packed_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Shape and strides of the dense block that holds each element once: repeated dimensions have
    size 1 there."""
    once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    packed, expected = [0] * len(once), 1
    for dimension in sorted(range(len(once)), key=lambda d: (strides[d], once[d], -d)):
        packed[dimension] = expected
        expected *= max(once[dimension], 1)
    return once, tuple(packed)


def copy_with_strides(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, whatever they are: broadcast and with gaps too; without
    history.

    >>> copy_with_strides(torch.arange(3.0).expand(2, 3)).stride()
    (0, 1)
    """
    if value.numel() == 0:
        return like(value)
    begin, end = byte_range(value)
    block = value.detach().as_strided(((end - begin) // value.itemsize,), (1,)).clone()
    return block.as_strided(value.shape, value.stride(), 0)


def overlaps(value: torch.Tensor) -> bool:
    """Returns True if two elements share memory, not counting dimensions of stride 0."""
    end = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False
