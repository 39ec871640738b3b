"""Models built on the meta device: whether one is, and its tensors on a real device, unfilled."""

import torch
from torch import nn

from zbcompile.passes.graph.fx import like


def is_on_meta(model: nn.Module) -> bool:
    """Returns True if a parameter or buffer exists on the meta device only."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An unfilled tensor or parameter on `device`, otherwise like `tensor`, with the attributes
    that it was given."""
    new = like(tensor, device=device)
    moved = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    vars(moved).update(vars(tensor))
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        moved.grad_dtype = tensor.grad_dtype
    return moved
