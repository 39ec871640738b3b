"""Compares steps of `schedule="auto"` with those of every name, on stages of unequal cost.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/auto_vs_names.py

GPT of 4 layers, width 256, sequence 128 and 8,192 words, a batch of 8 rows; one thread per rank. In
every round each contender takes one step, in a new random order. Names have 8 microbatches, with
the output layer whole and, except for those that cannot, sharded (`vocab=1`); "auto" chooses both
by the predicted step. "ratio" is the median over the rounds of a contender's time relative to that
of "auto" in the same round, with the middle half of these ratios: what the prediction misses is
below 1. About 5 minutes on two cores that do nothing else.
"""

import argparse
import copy
import random
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.passes.errors import CompileError
from zbcompile.schedules import ScheduleError, admits, names

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT

ROWS, LENGTH, WIDTH, WORDS = 8, 128, 256, 8192


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def contenders(model: GPT, options: argparse.Namespace) -> dict[str, zbcompile.Pipeline]:
    """Pipelines by what was asked for, "auto" first; what a name refuses is said and left out."""
    inputs, targets = batch()
    contenders_: list[tuple[str, dict[str, Any]]] = [("auto", {"microbatches": ROWS})]
    schedule_names = (
        options.names.split(",") if options.names else [n for n in names() if n != "auto"]
    )
    fitting = [name for name in schedule_names if admits(name, dist.get_world_size(), ROWS)]
    contenders_ += [
        (name, {"microbatches": ROWS, "vocab": vocab}) for name in fitting for vocab in ("off", 1)
    ]
    results = {}
    for name, keywords in contenders_:
        pipe = zbcompile.pipeline(
            copy.deepcopy(model), schedule=name, loss=loss, balance=options.balance, **keywords
        )  # type: ignore[call-overload]
        title = name if name == "auto" else f"{name}, vocab={keywords['vocab']}"
        try:
            pipe.compile(inputs, target=targets)
        except (CompileError, ScheduleError) as error:
            if dist.get_rank() == 0:
                print(f"{title} is left out: {str(error).splitlines()[0]}")
            continue
        results[title] = pipe
    return results


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(
        WORDS, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
    ).unbind()
    return inputs, targets


def measured(pipe: zbcompile.Pipeline) -> float:
    inputs, targets = batch()
    dist.barrier()
    begin = time.perf_counter()
    pipe.step(inputs, target=targets)
    dist.barrier()
    seconds = time.perf_counter() - begin
    for parameter in pipe.parameters():
        parameter.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="paired rounds (default: %(default)s)"
    )
    parser.add_argument("--names", help="default: all that admit this many microbatches")
    parser.add_argument(
        "--balance", default="flops", help="of all contenders (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(layers=4, width=WIDTH, heads=8, length=LENGTH)
    model.token, model.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    results = contenders(model, options)
    chance = random.Random(0)  # the same on every rank
    times: dict[str, list[float]] = {name: [] for name in results}
    for _ in range(options.rounds + 1):  # the first round warms up
        for name in chance.sample(list(results), len(results)):
            times[name].append(measured(results[name]))
    if dist.get_rank() == 0:
        print(results["auto"].program.plan)
        table = sorted(rows(times), key=lambda row: float(row[2]))
        print(tabulate(table, HEAD, floatfmt=("", ".3f", ".3f", ".3f", ".3f")))
    dist.destroy_process_group()


HEAD = ("", "s/step", "ratio", "from", "to")


def rows(times: dict[str, list[float]]) -> list[list[Any]]:
    table = []
    for name, seconds in times.items():
        ratios = [
            contender / auto for contender, auto in zip(seconds[1:], times["auto"][1:], strict=True)
        ]
        low, _, high = quantiles(ratios, n=4)
        table.append([name, median(seconds[1:]), median(ratios), low, high])
    return table


if __name__ == "__main__":
    main()
