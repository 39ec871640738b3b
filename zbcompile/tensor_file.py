"""Tensors in a safetensors file, with their strides kept beside it: the format itself knows contiguous ones only."""

from collections.abc import Mapping

import torch
from safetensors.torch import load, save

Strides = dict[str, list[int]]


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, Strides]:
    """The file's content, the same for the same tensors, and the stride of each."""
    dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    return save(dense), {name: list(tensor.stride()) for name, tensor in sorted(tensors.items())}


def tensors_from_bytes(content: bytes, strides: Strides, device: torch.device) -> dict[str, torch.Tensor]:
    """What `tensors_to_bytes` wrote, with the strides that the tensors had."""
    return {name: _laid_out(tensor.to(device), strides[name]) for name, tensor in load(content).items()}


def _laid_out(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """`tensor` with other strides; along those of 0 one entry stands for all."""
    if list(tensor.stride()) == stride:
        return tensor
    core = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    made = torch.empty_strided(core.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(core).expand(tensor.shape)
