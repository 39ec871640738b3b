"""A GPT whose output layer costs four transformer layers: on the last rank, redistributed, and
sharded.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/vocab.py

2 layers of width 256, sequence 128, 8 microbatches of 4, 1F1B; one thread per rank. With so few
layers no distribution is even: equal layers give the last rank five units of work and the first
rank one, the balancer gives four and two, sharding three each. (With four layers the balancer finds
four and four: then sharding saves memory, not time.)

All variants take turns in rounds; the medians of their ratios to equal layers per rank count. While
they are timed the process keeps the memory that it frees: glibc would return pages after one pass
and fetch them for the next one, which takes longer than the exponentials in them and varies between
runs. Bytes are those of the last rank: parameters, the moments of Adam, and the most that torch
allocates in a step besides. They are counted, and equal in every run but for a message.
"""

import argparse
import copy
import ctypes
import sys
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

LAYERS, WIDTH, LENGTH, MICROBATCHES, ROWS = 2, 256, 128, 8, 4
WORDS = 4 * (
    12 * WIDTH + 2 * LENGTH
)  # FLOPs of the output layer / those of a layer = WORDS / (12 width + 2 length)
STATES = 3  # parameter and two moments; gradients exist in a step alone
# glibc's number of the size beyond which free memory at the end of the heap is given back
TRIM_THRESHOLD = -1
# and of the size beyond which memory is outside the heap, and given back as soon as it is free
MMAP_THRESHOLD = -3
VARIANTS: dict[str, dict[str, Any]] = {
    "equal layers": {"balance": [f"blocks.{LAYERS // 2}"]},
    "redistributed": {},
    "vocab=1": {"vocab": 1},
    "vocab=2": {"vocab": 2},
}


@dataclass
class Measured:
    """One variant on this rank: seconds of every round, CPU seconds over all ranks, bytes of this
    rank."""

    pipe: zbcompile.Pipeline
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    bytes: int = 0


def model_with_words() -> nn.Module:
    model = GPT(layers=LAYERS, width=WIDTH, heads=4, length=LENGTH)
    model.token, model.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    return model


def prepare(model: nn.Module, options: dict[str, Any], inputs: Tensor, targets: Tensor) -> Measured:
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=MICROBATCHES, loss=next_byte_loss, **options
    )
    pipe.compile(inputs, target=targets)
    measured = Measured(pipe, torch.optim.AdamW(pipe.parameters()))
    step(measured, inputs, targets)
    return measured


def step(measured: Measured, inputs: Tensor, targets: Tensor) -> None:
    measured.pipe.step(inputs, target=targets)
    measured.optimizer.step()
    measured.optimizer.zero_grad()


def round_of(measured: Measured, inputs: Tensor, targets: Tensor) -> None:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step(measured, inputs, targets)
    dist.barrier()
    spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent)
    measured.seconds.append(time.perf_counter() - wall)
    measured.cpu.append(float(spent))


def count_bytes(measured: Measured, inputs: Tensor, targets: Tensor) -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        step(measured, inputs, targets)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((x for x in events if x.name() == "[memory]"), key=lambda x: x.start_ns())
    state = STATES * sum(parameter.nbytes for parameter in measured.pipe.parameters())
    measured.bytes = state + max(accumulate(event.nbytes() for event in events))


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 32 << 20)  # the largest value that it takes
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


def row(name: str, one: Measured, base: Measured) -> list[Any]:
    ratios = [
        median(a / b for a, b in zip(x, y, strict=True))
        for x, y in ((one.seconds, base.seconds), (one.cpu, base.cpu))
    ]
    return [name, *ratios, one.bytes / base.bytes, one.bytes / 2**20]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="paired rounds (default: %(default)s)"
    )
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = model_with_words()
    inputs, targets = torch.randint(WORDS, (2, ROWS * MICROBATCHES, LENGTH)).unbind()
    results = {
        name: prepare(copy.deepcopy(model), options, inputs, targets)
        for name, options in VARIANTS.items()
    }
    for _ in tqdm(range(rounds), disable=dist.get_rank() != 0, unit="round"):
        for measured in results.values():
            round_of(measured, inputs, targets)
    for measured in results.values():
        count_bytes(measured, inputs, targets)
    if dist.get_rank() == dist.get_world_size() - 1:
        rows = [row(name, measured, results["equal layers"]) for name, measured in results.items()]
        print(
            f"{dist.get_world_size()} ranks, {WORDS} words, {rounds} rounds; ratios to equal"
            " layers, output layer last"
        )
        print(
            tabulate(
                rows,
                ["variant", "step time", "CPU seconds", "bytes, last rank", "MiB"],
                floatfmt=".3f",
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
