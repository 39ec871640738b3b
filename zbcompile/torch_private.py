"""Every private PyTorch name that the runtime uses, with the reason and the versions that have it.

Supporting a newer torch starts here and in `passes/torch_private.py`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree  # 2.11-2.13: torch.export's own pytree; torch.utils.pytree is newer

pytree = pytree


def profiler_is_on() -> bool:
    """Whether a profiler records in this thread; `record_function` costs microseconds even where none does
    (2.11-2.13)."""
    return torch.autograd._profiler_enabled()


def found_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """What `unscale_` found for an optimizer, one tensor per device; empty before it. No public name says it
    (2.11-2.13)."""
    return list(scaler._found_inf_per_device(optimizer).values())


def add_found_infinity(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> None:
    """Make `step` and `update` know of an infinity found elsewhere (2.11-2.13, as FSDP's sharded scaler does)."""
    per_device: dict[Any, Any] = scaler._found_inf_per_device(optimizer)
    per_device[found.device] = found
