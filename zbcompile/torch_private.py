"""Every private PyTorch name that the runtime uses, with the reason and the versions that have it.

Supporting a newer torch starts here and in `passes/torch_private.py`.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree  # 2.11-2.13: torch.export's own pytree; torch.utils.pytree is newer

pytree = pytree


def profiler_is_on() -> bool:
    """Whether a profiler records in this thread; `record_function` costs microseconds even where none does
    (2.11-2.13)."""
    return torch.autograd._profiler_enabled()


def group_called(name: str) -> dist.ProcessGroup:
    """The process group of this name, by which functional collectives find it (2.11-2.13: no public function does)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, no-any-return]


def found_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """What `unscale_` found for an optimizer, one tensor per device; empty before it. No public name says it
    (2.11-2.13)."""
    return list(scaler._found_inf_per_device(optimizer).values())


def add_found_infinity(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> None:
    """Make `step` and `update` know of an infinity found elsewhere (2.11-2.13, as FSDP's sharded scaler does)."""
    per_device: dict[Any, Any] = scaler._found_inf_per_device(optimizer)
    per_device[found.device] = found


def gloo_link(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    """A gloo group of two that torch.distributed does not know of. The class is public, its constructor not documented
    (2.11-2.13; torch.distributed._dist2 makes groups so)."""
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def nccl_link(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    """A NCCL group of two, on a stream that goes before those of passes. As it is not bound to a device it is not split
    from another communicator, which would take all ranks (2.11-2.13, as `gloo_link`)."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def is_bound(group: dist.ProcessGroup | None) -> bool:
    """Whether `init_process_group` was given a device_id: new groups are then split from this one by all of its ranks
    (2.11-2.13)."""
    return getattr(group, "bound_device_id", None) is not None
