"""Memory over many steps, batch shapes and pipelines: what grows, and by how much each.

    python -m tests.support.soak [--steps 500] [--shapes 60] [--pipelines 60] [--exports 60] [--objects]
    torchrun --standalone --nproc-per-node 2 -m tests.support.soak --steps 2000 --shapes 0 --pipelines 0

from the repository's root. A line per phase and process: resident megabytes after each quarter, and
the slope over the last half. --exports does what shapes and pipelines do with a bare torch.export
of the same model: what grows there is torch's. --objects lists the types of Python objects that
have become more.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import zbcompile

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, next_byte_loss

LENGTH = 16


def resident() -> float:
    """Resident megabytes, once what is free has been returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, LENGTH + 1))


def model() -> GPT:
    return GPT(layers=2, width=16, heads=2, length=LENGTH)


def make() -> zbcompile.Pipeline:
    """In one process, or of as many as torchrun has started."""
    ranks = None if "WORLD_SIZE" in os.environ else 2
    return zbcompile.pipeline(
        model(), ranks=ranks, schedule="1f1b", microbatches=2, loss=next_byte_loss, max_shapes=2
    )


def export(of: GPT, rows: int) -> None:
    torch.export.export(of, (tokens(rows)[:, :-1].contiguous(),))


def step(pipe: zbcompile.Pipeline, rows: int) -> None:
    batch = tokens(rows)
    pipe.step(batch[:, :-1].contiguous(), target=batch[:, 1:].contiguous())


def types() -> Counter[str]:
    gc.collect()
    return Counter(
        f"{type(get_object).__module__}.{type(get_object).__qualname__}"
        for get_object in gc.get_objects()
    )


def measure(name: str, count: int, act: Callable[[int], None], objects: bool) -> None:
    """Do it `count` times, after as many as fill every cache."""
    with contextlib.redirect_stdout(None):  # each compilation says why
        for number in range(count // 4):
            act(number)
        result, before = [resident()], types()
        for number in range(count // 4, count):
            act(number)
            if (number + 1) % max(1, count // 4) == 0:
                result.append(resident())
    slope = (result[-1] - result[len(result) // 2]) / (
        count - (len(result) // 2 + 1) * (count // 4)
    )
    where = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    print(
        f"{name}{where}: {' '.join(f'{item:.1f}' for item in result)} MB, {slope:.4f} MB each",
        flush=True,
    )
    if objects:
        more = (types() - before).most_common(25)
        print("  " + ", ".join(f"{kind} +{grown}" for kind, grown in more))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory over many steps, shapes and pipelines.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--pipelines", type=int, default=60)
    parser.add_argument("--exports", type=int, default=0)
    parser.add_argument("--objects", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = make()
    if options.steps:
        measure("steps", options.steps, lambda _: step(pipe, 4), options.objects)
    if options.shapes:
        measure(
            "shapes", options.shapes, lambda number: step(pipe, 2 * (number + 3)), options.objects
        )
    if options.exports:
        one = model()
        measure(
            "exports of another shape",
            options.exports,
            lambda number: export(one, number + 3),
            options.objects,
        )
        measure(
            "exports of another model",
            options.exports,
            lambda _: export(model(), 2),
            options.objects,
        )
    if options.pipelines:
        measure("pipelines", options.pipelines, lambda _: step(make(), 4), options.objects)


if __name__ == "__main__":
    main()
