"""Loss scaling for fp16: the pipeline's backward runs on a scaled loss, and all ranks skip a step or none does."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zbcompile.api.pipeline import Pipeline
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import local_of
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer
from zbcompile.torch_private import add_found_infinity, found_infinities


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a pipeline, with its options. The pipeline's steps scale their loss by it; the
    loss that they return is not scaled. An infinity on any rank makes every rank skip `optimizer.step()`.

    >>> scaler = zbcompile.GradScaler(pipe)                                     # doctest: +SKIP
    >>> pipe.step(inputs, target=targets)      # no scaler.scale(loss).backward()  # doctest: +SKIP
    >>> scaler.unscale_(optimizer)             # before pipe.clip_grad_norm_       # doctest: +SKIP
    >>> scaler.step(optimizer); scaler.update()                                 # doctest: +SKIP
    """

    def __init__(self, pipe: Pipeline, device: str | torch.device | None = None, **options: Any) -> None:
        if device is not None and torch.device(device).type != pipe.device.type:
            raise PipelineError(f"device={str(device)!r}, but the pipeline is on {pipe.device}. Leave device= out.")
        super().__init__(pipe.device.type, **options)
        if pipe.scaler is not None:
            raise PipelineError("this pipeline already has a GradScaler; make one per pipeline.")
        pipe.scaler = self
        self._pipe = pipe

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As `torch.amp.GradScaler.unscale_`; every rank must call it, directly or by `step`."""
        if isinstance(optimizer, PipelineOptimizer) and optimizer.request.validates:
            if self.is_enabled():
                add_found_infinity(self, optimizer, optimizer.found_infinity())  # it has unscaled the gradients
            return
        if isinstance(optimizer, PipelineOptimizer):
            optimizer.take_replaced()
        with _plain(optimizer):
            super().unscale_(optimizer)
        if self.is_enabled():
            self._share(found_infinities(self, optimizer), optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As `torch.amp.GradScaler.step`, on all ranks or on none."""
        if self.is_enabled() and not found_infinities(self, optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _share(self, found: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Set every rank's flags to what any rank found."""
        worst = torch.zeros((), device=self._pipe.device)
        for infinity in found:
            worst = torch.maximum(worst, infinity.to(worst.device))
        add_found_infinity(self, optimizer, self._pipe.largest(worst))


@contextmanager
def _plain(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer has plain parts in place of DTensors: torch unscales all in a call that takes one kind."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": list(map(local_of, group["params"]))} for group in groups]
    try:
        yield
    finally:
        optimizer.param_groups = groups
