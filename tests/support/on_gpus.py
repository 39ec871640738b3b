"""What tests of GPUs share; and how a function that other tests run on the CPU's ranks runs on
GPUs, watched."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

import zbcompile
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"NCCL connects GPUs: needs 2, found {GPUS}")
four_gpus = pytest.mark.skipif(
    GPUS < 4, reason=f"two replicas of two ranks: needs 4 GPUs, found {GPUS}"
)


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Every operation that makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what `function` returns, on the host. It runs as on the CPU, but the tensors that it makes
    are on this rank's GPU, and from the second one on no step of a pipeline or its optimizer waits
    for the GPU."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (
        torch.device("cuda", rank),
        _from_the_second(zbcompile.Pipeline),
        _from_the_second(PipelineOptimizer),
    ):
        result = function(*args)
    written = io.BytesIO()
    torch.save(result, written)
    written.seek(0)
    return torch.load(written, map_location="cpu", weights_only=False)


@contextmanager
def _from_the_second(kind: type[Any]) -> Iterator[None]:
    """Inside, `step` of an object may wait for the device only the first time, when it compiles and
    makes state."""
    seen: WeakSet[Any] = WeakSet()
    step = kind.step

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        if self not in seen:
            seen.add(self)
            return step(self, *args, **options)
        with waiting_forbidden():
            return step(self, *args, **options)

    with mock.patch.object(kind, "step", watched):
        yield
