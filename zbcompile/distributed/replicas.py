"""The replicas of a pipeline: the ranks that hold the same stages."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import as_contiguous


@dataclass
class Replicas:
    """The ranks that hold the same stages, one per replica of the pipeline; this process is number `rank` of `count`.

    `synchronise` is False inside `no_sync`. `partial` says that `.grad` holds this replica's part of the sum: after a
    step without synchronisation. Otherwise all replicas hold the whole sum, and all but the first clear it before they
    add to it, so that the next reduction counts it once.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    synchronise: bool = True
    partial: bool = False

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all replicas the values of the first."""
        if self.count > 1:
            for tensor in tensors:
                flat = as_contiguous(tensor.detach())
                dist.broadcast(flat, group=self.group, group_src=0)

    def forget(self) -> None:
        """Forget the gradients of a failed step."""
        self.partial = False
