"""Two processes train on one GPU, their messages staged through the host: the kernels and streams
of two ranks for who has a single GPU. NCCL connects no GPU to itself, and zbcompile refuses it;
this script puts gloo in its place.

torchrun --standalone --nproc-per-node 2 examples/benchmarks/one_gpu.py --verify     # options of
examples/train_gpt.py
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.distributed.transport import TaggedLinks

sys.path.insert(0, str(Path(__file__).parents[1]))
import train_gpt

WITH_TENSORS = ("all_reduce", "broadcast", "send", "recv")  # of torch.distributed, by a step


@dataclass
class Staged:
    """A message under way between hosts; what arrives is copied to the GPU."""

    work: dist.Work | None
    host: Tensor
    device_tensor: Tensor | None = None

    def wait(self) -> bool:
        if self.work is not None:
            self.work.wait()
        if self.device_tensor is not None:
            self.device_tensor.copy_(self.host)
        return True


def staged(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that takes tensors of the GPU as well, by way of the host."""

    def run(tensor: Tensor, *args: Any, **options: Any) -> Any:
        host = tensor.cpu()
        return_work = options.get("async_op", False)
        result = call(host, *args, **options)
        work = Staged(result if return_work else None, host, tensor)
        return work if return_work else work.wait()

    return run


def staged_send(
    channels: TaggedLinks, tensor: Tensor, message: Any, index: int, peer: int
) -> Staged:
    host = tensor.cpu()
    return Staged(channels.group.send([host], peer, channels._tag(message, index)), host)


def staged_receive(
    channels: TaggedLinks, tensor: Tensor, message: Any, index: int, peer: int
) -> Staged:
    host = torch.empty_like(tensor, device="cpu")
    return Staged(channels.group.recv([host], peer, channels._tag(message, index)), host, tensor)


def main() -> None:
    dist.init_process_group("gloo")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # all take the first GPU
    calls: dict[str, Any] = {name: staged(getattr(dist, name)) for name in WITH_TENSORS}
    ranks = "zbcompile.distributed.process_group"
    with (
        mock.patch.multiple("torch.distributed", **calls),
        mock.patch.multiple(TaggedLinks, send=staged_send, receive=staged_receive),
        mock.patch(f"{ranks}.backend_of", return_value="gloo"),
    ):
        train_gpt.main()


if __name__ == "__main__":
    main()
