"""Assignment of GPUs: a different one for every local rank; and how many streams of one can make
progress at a time."""

import os
import warnings
from collections.abc import Mapping

import torch

from zbcompile.errors import PipelineError
from zbcompile.passes import gpu

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# CUDA's default. Two neighbours have four channels, and each channel has a stream
FEWEST_QUEUES = 8


def take_gpu() -> None:
    """Make the GPU of this process's LOCAL_RANK its current one. Raises PipelineError on every
    process of a machine that has fewer GPUs than processes."""
    gpu.make_current(torch.device(gpu.KIND, own_gpu(os.environ, gpu.device_count())))


def own_gpu(environment: Mapping[str, str], count: int) -> int:
    """The index of this process's GPU among `count`. A single one is simply taken: a launcher may
    show each process a different one. NCCL refuses two ranks on one GPU.

    >>> own_gpu({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, count=8)
    2
    """
    local = int(environment.get("LOCAL_RANK", "0"))
    ranks = int(environment.get("LOCAL_WORLD_SIZE", local + 1))
    if count > 1 and ranks > count:
        raise PipelineError(
            f"local rank {local} of {ranks} on this machine, which has {count} GPUs: every process"
            f" needs its own. Start {count} processes per machine (torchrun --nproc-per-node"
            f" {count}), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU."
        )
    return local if count > 1 else 0


def require_distinct_gpus(names: Mapping[int, str], device: torch.device) -> None:
    """Raises PipelineError if two ranks use one GPU: NCCL cannot connect it to itself.

    Args:
        names: The name of every rank's GPU, unique over all machines.
        device: That of this rank.
    """
    first_users: dict[str, int] = {}
    for rank, name in names.items():
        if name in first_users:
            raise PipelineError(
                f"ranks {first_users[name]} and {rank} use the same GPU ({name}); this rank's model"
                f" is on {device}. Give every process its own:"
                ' torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before model.cuda().'
            )
        first_users[name] = rank


def warn_of_few_queues(environment: Mapping[str, str]) -> None:
    """Warn if the streams of the channels have to share hardware queues with the passes. Then a
    second receive, which waits in its stream for the first, also holds back the pass whose result
    the sender of the first one needs.
    """
    value = environment.get(QUEUES, "")
    if value.isdecimal() and int(value) < FEWEST_QUEUES:
        warnings.warn(
            f"{QUEUES}={value}: streams that share a hardware queue of the GPU wait for each other,"
            " and a pipeline whose receives are posted early can stand still. Unset it (CUDA takes"
            f" {FEWEST_QUEUES}), or set it to 32.",
            RuntimeWarning,
            stacklevel=2,
        )
