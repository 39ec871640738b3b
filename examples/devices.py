"""The device of an example: on the GPU of its process, if the machine has GPUs, else on the CPU."""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option `--device`."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="every process takes its own GPU (default on this machine: %(default)s)",
    )


def device_of_rank(name: str) -> torch.device:
    """This process's device: the CPU, or the GPU of its LOCAL_RANK."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU on this machine; use --device cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def start_group(device: torch.device) -> None:
    """The group of torchrun's processes, with the backend of the device."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """CPU seconds of this process; on a GPU, seconds until it has done the work."""
    if device.type == "cpu":
        begin = time.process_time()
        work()
        return time.process_time() - begin
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
