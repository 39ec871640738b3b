"""The tensors of messages between stages: as they are sent (packed), and with the strides that a
graph was traced for (laid out)."""

import torch

from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.graph.strides import is_dense, packed_layout
from zbcompile.passes.torch_names import dtype_named


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without gaps and with each element once: the tensor itself if it is dense."""
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor
    shape, strides = packed_layout(tensor.shape, tensor.stride())
    return _copied(tensor, shape, strides)


def packed_buffer(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Memory that a packed tensor of this specification can be received into."""
    shape, strides = packed_layout(spec.shape, spec.stride)
    return torch.empty_strided(shape, strides, dtype=dtype_named(spec.dtype), device=device)


def empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A contiguous, uninitialised tensor of this specification."""
    return torch.empty(spec.shape, dtype=dtype_named(spec.dtype), device=device)


def laid_out(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`value`, packed or not, with the strides that the graph was traced for; a copy only if they
    differ."""
    if value.shape == spec.shape and (value.stride() == spec.stride or _same_strides(value, spec)):
        return value
    once, _ = packed_layout(spec.shape, spec.stride)
    return _copied(value, once, spec.stride).expand(spec.shape)


def as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of a dense tensor's memory, dimensions in order of strides: backends send
    nothing else."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(memory_order(tensor))


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor, those with the largest strides first."""
    if tensor.is_contiguous():
        return list(range(tensor.ndim))
    return sorted(
        range(tensor.ndim), key=lambda i: (tensor.stride(i), tensor.shape[i]), reverse=True
    )


def _copied(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of the first elements of each dimension."""
    first = tensor[tuple(slice(size) for size in shape)]
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(
        first
    )


def _same_strides(value: torch.Tensor, spec: TensorSpec) -> bool:
    """Returns whether strides agree. Those of dimensions of size 1 mean nothing and are ignored."""
    return all(
        a == b or size == 1
        for a, b, size in zip(value.stride(), spec.stride, value.shape, strict=True)
    )
