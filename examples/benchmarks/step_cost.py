"""CPU seconds of one pipelined step, summed over its ranks, relative to one eager process doing the
same work.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_cost.py

8 layers, width 256, sequence 128, 8 microbatches of 2, AdamW; one thread per rank. Eager and every
schedule take turns in rounds, and the median of the rounds' ratios counts, because a shared machine
drifts.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

MICROBATCHES = 8


def eager_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    for part, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (next_byte_loss(model(part), target) / MICROBATCHES).backward()


def cpu_seconds(step: Callable[[], object], optimizer: torch.optim.Optimizer) -> float:
    """CPU seconds of this process for one step and its update."""
    begin = time.process_time()
    step()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - begin


def summed(seconds: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def measure(schedules: list[str], rounds: int) -> dict[str, list[float]]:
    """The ratios of all rounds, by schedule."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=256, heads=8, length=128)
    inputs, targets = torch.randint(256, (2, 2 * MICROBATCHES, 128)).unbind()
    pipes = {name: _pipe(copy.deepcopy(model), name, inputs, targets) for name in schedules}
    optimizers = {name: torch.optim.AdamW(pipe.parameters()) for name, pipe in pipes.items()}
    updated = torch.optim.AdamW(model.parameters())
    ratios: dict[str, list[float]] = {name: [] for name in schedules}
    for turn in tqdm(range(rounds + 1), disable=dist.get_rank() != 0, unit="round"):
        dist.barrier()
        own = (
            cpu_seconds(lambda: eager_step(model, inputs, targets), updated)
            if dist.get_rank() == 0
            else 0.0
        )
        eager = summed(own)
        for name, pipe in pipes.items():
            dist.barrier()
            pipelined = summed(
                cpu_seconds(partial(pipe.step, inputs, target=targets), optimizers[name])
            )
            if turn:  # the first round warms up
                ratios[name].append(pipelined / eager)
    return ratios


def _pipe(model: nn.Module, schedule: str, inputs: Tensor, targets: Tensor) -> zbcompile.Pipeline:
    pipe = zbcompile.pipeline(
        model, schedule=schedule, microbatches=MICROBATCHES, loss=next_byte_loss
    )
    return pipe.compile(inputs, target=targets)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedules",
        default="1f1b,zb-h1,zb-v",
        help="names, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="paired rounds (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ratios = measure(options.schedules.split(","), options.rounds)
    if dist.get_rank() == 0:
        rows = [[name, median(found), min(found), max(found)] for name, found in ratios.items()]
        print(
            f"CPU seconds of a step over {dist.get_world_size()} ranks / one eager process,"
            f" {options.rounds} rounds"
        )
        print(tabulate(rows, ["schedule", "median", "min", "max"], floatfmt=".3f"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
