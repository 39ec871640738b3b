"""Channels, GPUs and devices: what a pipeline needs of NCCL, as far as a machine without one can
show it."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.oracle import PROBLEMS
from tests.support.training import Case, pipeline_of
from zbcompile.distributed.process_group import (
    backend_of,
    require_distinct_gpus,
    warn_of_few_queues,
)
from zbcompile.errors import PipelineError


class NoValues(TorchDispatchMode):
    """Refuses to tell the host the value of a tensor: on CUDA that would wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_no_step_reads_a_value_of_a_tensor() -> None:
    """Loss and norm are tensors."""
    pipe = pipeline_of(Case("small-dropout", "zb-v", 2, 4, exact=False))
    batch = PROBLEMS["small-dropout"].batches(1, 8)[0]
    pipe.step(*batch.args, target=batch.target)
    with NoValues():
        loss = pipe.step(*batch.args, target=batch.target)
        norm = pipe.clip_grad_norm_(1.0)
    assert torch.isfinite(loss)
    assert torch.isfinite(norm)


def test_every_rank_has_a_gpu_with_queues_and_a_backend_that_fits() -> None:
    require_distinct_gpus({0: "a", 1: "b"}, torch.device("cuda:0"))
    with pytest.raises(PipelineError, match=r"ranks 0 and 2 use the same GPU \(a\)"):
        require_distinct_gpus({0: "a", 1: "b", 2: "a"}, torch.device("cuda:0"))
    with pytest.warns(RuntimeWarning, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1: .* Unset it"):
        warn_of_few_queues({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    for enough in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        with warnings.catch_warnings(action="error"):
            warn_of_few_queues(enough)
    cuda = "on cuda:0, for which the process group has the backend gloo.*Move the model"
    with patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:gloo"):
        for device, says in (("cuda:0", cuda), ("meta", "the model is on meta")):
            with pytest.raises(PipelineError, match=f"(?s){says}"):
                backend_of(None, torch.device(device))  # type: ignore[arg-type]
