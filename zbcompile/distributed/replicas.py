"""The replicas of a pipeline: the ranks that hold the same stages and compute losses of their own."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import as_contiguous


@dataclass
class Replicas:
    """The ranks that hold the same stages, one per loss that the step averages: along "dp", "ep" and "cp" of the mesh.
    This process is number `rank` of `count`.

    `synchronise` is False inside `no_sync`. `partial` are the parameters whose `.grad` holds this replica's part of the
    sum: those of steps without synchronisation. Of the others all replicas hold the whole sum, and all but the first
    clear it before they add to it, so that the next reduction counts it once.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    synchronise: bool = True
    partial: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """Forget the gradients of a failed step."""
        self.partial.clear()


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of `group` the values of its first."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(as_contiguous(tensor.detach()), group=group, group_src=0)
