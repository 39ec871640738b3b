"""An Accelerator for which all processes of one pipeline are one, since they train on the same
batch."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.mesh import BATCHES
from zbcompile.errors import PipelineError


class PipelineAccelerator(Accelerator):
    """Data loaders, gathers and counts are those of the replicas. Set `pipe` before preparing a
    loader.

    >>> accelerator = PipelineAccelerator(mixed_precision="bf16")  # doctest: +SKIP
    >>> accelerator.pipe = pipe = zbcompile.pipeline(model, schedule="zb-v")  # doctest: +SKIP
    >>> loader = accelerator.prepare(loader)  # doctest: +SKIP
    """

    pipe: Pipeline | None = None

    @property
    def num_processes(self) -> int:
        """The number of processes with batches of their own: the replicas."""
        return super().num_processes if self.pipe is None else self.pipe.ranks.mesh.size(*BATCHES)

    @property
    def process_index(self) -> int:
        """The number of this process's replica."""
        return super().process_index if self.pipe is None else self.pipe.ranks.mesh.index(*BATCHES)

    @property
    def dispatch_batches(self) -> bool:
        """Every process reads the data itself; the first one cannot deal out what others need
        whole."""
        return False

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Returns the optimizer unchanged. Its state is the pipeline's, and empty until that is
        compiled."""
        if self.mixed_precision == "fp16":
            raise PipelineError(
                'PipelineAccelerator: mixed_precision="fp16"; train in bfloat16,'
                ' mixed_precision="bf16".'
            )
        return super().prepare_optimizer(optimizer, device_placement=False)

    def gather(self, tensor: Any) -> Any:
        """The tensors of all replicas, joined along dimension 0."""
        group = None if self.pipe is None else self.pipe.ranks.mesh.group(*BATCHES)
        return tensor if group is None else recursively_apply(partial(_gathered, group), tensor)


def _gathered(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
    gathered = local.new_empty((group.size() * len(local), *local.shape[1:]))
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered
