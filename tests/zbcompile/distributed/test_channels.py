"""GPUs and devices: what a pipeline needs of NCCL, as far as a machine without one can show it."""

import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from zbcompile.distributed.process_group import (
    backend_of,
    require_distinct_gpus,
    warn_of_few_queues,
)
from zbcompile.errors import PipelineError


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
