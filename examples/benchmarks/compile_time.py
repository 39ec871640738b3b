"""CPU seconds from a model to its program, by depth: capture, cuts, stages. One core; the program is for 8 ranks.

    OMP_NUM_THREADS=1 python examples/benchmarks/compile_time.py

A GPT of width 256, zb-h1. The last two columns compile every stage separately, and give the ratio.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from tabulate import tabulate
from tqdm import tqdm

import zbcompile
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import compile_laid_out, lay_out_step
from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.passes.compile_options import Choices
from zbcompile.program.program import Program
from zbcompile.schedules import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

HEADERS = ("layers", "total s", "s per layer", "capture", "cuts", "stages", "distinct graphs", "unshared", "ratio")
Result = TypeVar("Result")


def timed(make: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds of this process."""
    begin = time.process_time()
    result = make()
    return time.process_time() - begin, result


def example(layers: int) -> zbcompile.Example:
    tokens = torch.randint(256, (2, 129))
    model = GPT(layers=layers, width=256, heads=8, length=128)
    return zbcompile.Example(model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous())


def measure(layers: int, schedule_name: str, ranks: int) -> list[float]:
    """One line of the table."""
    given, schedule, choices = example(layers), build(schedule_name, ranks, 2 * ranks), Choices()
    microbatch = one_microbatch(given)
    capture, laid_out = timed(lambda: lay_out_step(given.model, microbatch, given.loss))
    cuts, _ = timed(lambda: plan_cuts(laid_out.line, schedule, choices))

    def compiled() -> Program:
        return compile_laid_out(given.model, microbatch, laid_out, schedule, choices)

    whole, program = timed(compiled)
    with mock.patch("zbcompile.passes.stage.deduplicate.same_work", side_effect=itertools.count()):
        alone, _ = timed(compiled)
    total, distinct = capture + whole, len({stage.original for stage in program.stages})
    return [layers, total, total / layers, capture, cuts, whole - cuts, distinct, alone - cuts, alone / whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,24,48", help="separated by commas (default: %(default)s)")
    parser.add_argument("--schedule", default="zb-h1", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(2, "1f1b", 1)  # imports, and torch's own caches
    depths = [int(layers) for layers in options.layers.split(",")]
    rows = [measure(layers, options.schedule, options.ranks) for layers in tqdm(depths, unit="model")]
    print(tabulate(rows, HEADERS, floatfmt=".2f"))


if __name__ == "__main__":
    main()
