"""CPU seconds from a model to its program, by depth: export, cuts, stages. One core; the program is
for 8 ranks.

    OMP_NUM_THREADS=1 python examples/benchmarks/compile_time.py

A GPT of width 256, zb-h1.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from tabulate import tabulate
from tqdm import tqdm

import zbcompile
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import compile_program, export_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.partition.balance_stages import balanced_cuts
from zbcompile.passes.partition.cut_points import forward_line
from zbcompile.schedules import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

HEADERS = ("layers", "total s", "s per layer", "export", "cuts", "stages", "distinct graphs")
Result = TypeVar("Result")


def timed(make: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds of this process."""
    begin = time.process_time()
    result = make()
    return time.process_time() - begin, result


def example(layers: int) -> zbcompile.Example:
    tokens = torch.randint(256, (2, 129))
    model = GPT(layers=layers, width=256, heads=8, length=128)
    return zbcompile.Example(
        model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous()
    )


def measure(layers: int, schedule_name: str, ranks: int) -> list[float]:
    """One line of the table."""
    example_, schedule, choices = (
        example(layers),
        build(schedule_name, ranks, 2 * ranks),
        CompileOptions(),
    )
    microbatch = one_microbatch(example_)
    export, exported = timed(lambda: export_step(example_.model, microbatch, example_.loss))
    hardware = Hardware.find("cpu-core")
    ranks_of = [schedule.placement.rank(stage) for stage in range(schedule.stages)]
    cuts, _ = timed(
        lambda: balanced_cuts(exported.step, forward_line(exported.step), ranks_of, hardware)
    )
    seconds_, program = timed(
        lambda: compile_program(example_.model, microbatch, exported, schedule, choices)
    )
    total, distinct = export + seconds_, len({stage.original for stage in program.stages})
    return [layers, total, total / layers, export, cuts, seconds_ - cuts, distinct]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", default="12,24,48", help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--schedule", default="zb-h1", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(2, "1f1b", 1)  # imports, and torch's own caches
    depths = [int(layers) for layers in options.layers.split(",")]
    rows = [
        measure(layers, options.schedule, options.ranks) for layers in tqdm(depths, unit="model")
    ]
    print(tabulate(rows, HEADERS, floatfmt=".2f"))


if __name__ == "__main__":
    main()
