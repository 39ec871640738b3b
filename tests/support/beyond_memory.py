"""A Llama whose parameters alone exceed what a rank may hold trains, divided among replicas.

    python -m tests.support.beyond_memory --replicas 4 --layers 40 --width 1280        from the repository's root

The limit is one of address space (RLIMIT_AS), in which libraries, stacks and all else of a process count, too: by
default the parameters' bytes. Prints what each process has had at most, of it and of resident memory.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from gpt import next_byte_loss
from llama import Llama
from tests.support.live_storages import Alive, leave_aside, living_tensors
from zbcompile.runtime.action_loop import RankRun

LENGTH, HEADS, MICROBATCHES = 16, 4, 2
SMALL = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
STACK = 256 << 10  # bytes of the stack of each thread: all of it counts as address space


def init(name: str, tensor: torch.Tensor) -> None:
    """Fill a parameter or a buffer, alike in every replica."""
    if name.endswith(("cos", "sin")):
        angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(tensor.shape[1]) / tensor.shape[1])
        tensor.copy_(angles.cos() if name.endswith("cos") else angles.sin())
    elif tensor.dim() > 1:
        tensor.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
    else:
        tensor.fill_(1.0)


@contextmanager
def within(limit: int, before: list[torch.Tensor]) -> Iterator[Alive]:
    """Raises MemoryError if storages take more than `limit` bytes after any action of a step, those `before` it not
    counted."""
    executed = RankRun._execute
    with Alive(living_tensors(), before) as alive, pytest.MonkeyPatch.context() as patch:

        def execute(run: RankRun, step: tuple[Any, ...]) -> None:
            executed(run, step)
            if alive.now > limit:
                raise MemoryError(f"{alive.now} bytes after {step[0].action}, of {limit}")

        patch.setattr(RankRun, "_execute", execute)
        yield alive


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and target, the same in every replica."""
    tokens = torch.arange(MICROBATCHES * (LENGTH + 1)).remainder(256).view(MICROBATCHES, -1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def losses(layers: int, width: int, share: float | None, steps: int = 3) -> tuple[list[float], float]:
    """Of a few steps with SGD, every process a replica; and the most that storages took, as a share of the parameters'
    bytes. Raises MemoryError if that is above `share` after any action."""
    before, mesh = leave_aside(), init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))
    with torch.device("meta"):
        model = Llama(layers, width, HEADS, LENGTH)
    size = sum(parameter.nbytes for parameter in model.parameters())
    options: dict[str, Any] = {"schedule": "looped-bfs", "chunks": layers, "microbatches": MICROBATCHES, "init": init}
    pipe = zbcompile.pipeline(model, loss=next_byte_loss, mesh=mesh, **options)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, zero=3, reshard_after_forward=True)
    inputs, target = batch()
    pipe.compile(inputs, target=target)
    found = []
    with nullcontext() if share is None else within(int(share * size), before) as alive:
        for _ in range(steps):
            found.append(float(pipe.step(inputs, target=target)))
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()
    return found, alive.most / size if alive else 0.0


def most(name: str) -> float:
    """What the process has had at most, in MB."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, default in (("replicas", 4), ("layers", 40), ("width", 1280)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, help="MB of address space (default: the parameters' bytes)")
    options = parser.parse_args()
    width = options.width
    size = 4 * (options.layers * (13 * width * width + 2 * width) + 513 * width)
    limit = options.limit or size / 1e6
    if "RANK" not in os.environ:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.replicas}"]
        command = [*start, "-m", "tests.support.beyond_memory", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env={**os.environ, **SMALL}).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    resource.setrlimit(resource.RLIMIT_AS, (int(limit * 1e6), int(limit * 1e6)))
    found = losses(options.layers, width, None)[0]
    text = f"rank {dist.get_rank()}: losses {found}, parameters {size / 1e6:,.0f} MB, limit {limit:,.0f} MB; at most "
    print(f"{text}{most('VmPeak'):,.0f} MB of address space, {most('VmHWM'):,.0f} MB resident", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
