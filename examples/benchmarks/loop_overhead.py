"""What an action costs beside its graph: CPU microseconds of the action loop, without the operations that it runs.

    python examples/benchmarks/loop_overhead.py                                              # in one process
    torchrun --standalone --nproc-per-node 2 examples/benchmarks/loop_overhead.py            # over messages

The stages are tiny, so a step is almost all overhead; the time inside the graphs is subtracted. Sends and receives
count as actions, and what a whole step does beside them (cutting the batch, sharing the loss) is spread over them.
Target: below 40 microseconds per action.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.schedules.actions import flatten
from zbcompile.stage_plan import CompiledStage


class Tiny(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Timed:
    """A piece of a stage with the CPU time that its calls took."""

    def __init__(self, run: object) -> None:
        self.run, self.seconds = run, 0.0

    def __call__(self, values: list[Any]) -> object:
        return self.timed(values)

    def timed(self, *values: list[Any]) -> object:
        begin = time.thread_time()
        results = self.run(*values)  # type: ignore[operator]
        self.seconds += time.thread_time() - begin
        return results


def time_graphs(stages: dict[int, CompiledStage]) -> list[Timed]:
    """Put a clock around every graph."""
    clocks = []
    for stage in stages.values():
        for name, call in stage.calls.items():
            clocks.append(Timed(call.run))
            stage.calls[name] = type(call)(**{**vars(call), "run": clocks[-1]})  # type: ignore[index]
    return clocks


class TimedPair(Timed):
    """A merged pair: what it calls in its middle belongs to the loop, not to the graph."""

    def __call__(self, values: list[Any]) -> object:
        take, give = values[-2:]
        clocks = [Timed(take), Timed(give)]
        values[-2:] = [clocks[0], lambda: clocks[1].timed()]
        result = super().__call__(values)
        self.seconds -= sum(clock.seconds for clock in clocks)
        return result


def overhead(schedule: str, ranks: int, microbatches: int, rounds: int) -> float:
    """CPU microseconds per action, the median of the rounds."""
    x = torch.randn(microbatches, 4)
    pipe = zbcompile.pipeline(
        Tiny(8), schedule=schedule, microbatches=microbatches, loss=F.mse_loss, ranks=ranks if ranks else None
    )
    pipe.compile(x, target=x)
    executable = pipe._compiled.first()
    clocks = time_graphs(executable.stages)  # type: ignore[arg-type]
    for plan in executable.plans:
        for kind, run in plan.merged.items():
            clocks.append(TimedPair(run))
            plan.merged[kind] = clocks[-1]  # type: ignore[index]
    programs = [executable.program.lowered.programs[plan.rank] for plan in executable.plans]
    actions = sum(len(flatten(program)) for program in programs)
    found = []
    for _ in range(rounds + 3):
        for clock in clocks:
            clock.seconds = 0.0
        begin = time.thread_time()
        pipe.step(x, target=x)
        spent = time.thread_time() - begin - sum(clock.seconds for clock in clocks)
        found.append(1e6 * spent / actions)
    return median(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v,dualpipe-v", help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="steps; the median counts (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spread = "RANK" in os.environ
    if spread:
        dist.init_process_group("gloo")
    ranks = 0 if spread else 2
    names = options.schedules.split(",")
    rows = [[name, overhead(name, ranks, options.microbatches, options.rounds)] for name in names]
    if not spread or dist.get_rank() == 0:
        place = f"{dist.get_world_size()} processes" if spread else "one process"
        print(f"CPU microseconds of the loop per action, {place}, {options.microbatches} microbatches")
        print(tabulate(rows, ["schedule", "us/action"], floatfmt=".1f"))
    if spread:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
