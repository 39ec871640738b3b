"""What an action costs beside its graph: CPU microseconds of the host, without the operations that it runs.

    python examples/benchmarks/loop_overhead.py                                              # in one process
    torchrun --standalone --nproc-per-node 2 examples/benchmarks/loop_overhead.py            # over messages

The stages are tiny, so a step is almost all overhead; the time inside the graphs is subtracted. Steps with few and
with many microbatches are compared: the difference is what one more action costs (sends and receives are actions too),
the rest is what a whole step costs beside its actions (looking at the batch and the model, sharing the loss). Over
messages a bare exchange through torch.distributed is measured beside it (isend, irecv and both waits, of tensors as
large as ours, nothing else), and what remains of ours without that. Time is that of the calling thread.
Target: below 40 microseconds per action.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.schedules.actions import MESSAGES, flatten
from zbcompile.stage_plan import CompiledStage

WIDTH = 4


class Tiny(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Timed:
    """A function with the CPU time that its calls took."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.seconds = run, 0.0

    def __call__(self, *values: Any) -> Any:
        begin = time.thread_time()
        results = self.run(*values)
        self.seconds += time.thread_time() - begin
        return results


class TimedPair(Timed):
    """A merged pair: what it calls in its middle belongs to the loop, not to the graph."""

    def __call__(self, values: list[Any]) -> Any:  # type: ignore[override]
        clocks = [Timed(call) for call in values[-2:]]
        values[-2:] = clocks
        results = super().__call__(values)
        self.seconds -= sum(clock.seconds for clock in clocks)
        return results


def time_graphs(stages: dict[int, CompiledStage]) -> list[Timed]:
    """Put a clock around every graph."""
    clocks = []
    for stage in stages.values():
        for name, call in stage.calls.items():
            clocks.append(Timed(call.run))
            stage.calls[name] = type(call)(**{**vars(call), "run": clocks[-1]})  # type: ignore[index]
    return clocks


class Cost(NamedTuple):
    """Of one step: its actions on this process's ranks, how many of them are messages, and CPU microseconds."""

    actions: int
    messages: int
    microseconds: float


def cost(schedule: str, ranks: int | None, microbatches: int, rounds: int) -> Cost:
    """What a step costs without its graphs, the least of the rounds."""
    x = torch.randn(microbatches, WIDTH)
    pipe = zbcompile.pipeline(Tiny(8), schedule=schedule, microbatches=microbatches, loss=F.mse_loss, ranks=ranks)
    pipe.compile(x, target=x)
    executable = pipe._compiled.first()
    clocks = time_graphs(executable.stages)  # type: ignore[arg-type]
    for plan in executable.plans:
        for kind, run in plan.merged.items():
            clocks.append(TimedPair(run))
            plan.merged[kind] = clocks[-1]  # type: ignore[index]
    found = []
    for _ in range(rounds + 3):
        for clock in clocks:
            clock.seconds = 0.0
        begin = time.thread_time()
        pipe.step(x, target=x)
        found.append(time.thread_time() - begin - sum(clock.seconds for clock in clocks))
    pipe.close()
    programs = [executable.program.lowered.programs[plan.rank] for plan in executable.plans]
    actions = [action for program in programs for action in flatten(program)]
    return Cost(len(actions), sum(action.op in MESSAGES for action in actions), 1e6 * min(found[3:]))


def bare_message(rounds: int, count: int = 32) -> float:
    """CPU microseconds of one end of a message between two neighbours: `count` of them sent and received at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    if peer >= ranks:
        return float("nan")
    sent, arrived = [[torch.randn(1, WIDTH) for _ in range(count)] for _ in range(2)]
    found = []
    for _ in range(rounds):
        begin = time.thread_time()
        receives = [dist.irecv(tensor, peer, tag=tag) for tag, tensor in enumerate(arrived)]
        sends = [dist.isend(tensor, peer, tag=tag) for tag, tensor in enumerate(sent)]
        for work in (*receives, *sends):
            work.wait()  # type: ignore[union-attr]
        found.append(time.thread_time() - begin)
    return 1e6 * min(found) / (2 * count)


def row(schedule: str, ranks: int | None, microbatches: int, rounds: int) -> list[Any]:
    """The costs of a schedule as the table shows them."""
    few, many = (cost(schedule, ranks, count, rounds) for count in (microbatches, 3 * microbatches))
    actions, messages = many.actions - few.actions, many.messages - few.messages
    each = (many.microseconds - few.microseconds) / actions
    step = few.microseconds - each * few.actions
    if ranks is not None:
        return [schedule, each, step]
    bare = bare_message(rounds)
    return [schedule, each, step, 100 * messages / actions, bare, each - bare * messages / actions]


HEAD = [
    "schedule",
    "us / action",
    "us / step beside",
    "messages, % of actions",
    "us / bare message",
    "ours, us / action",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v,dualpipe-v", help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="and three times as many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="steps; the cheapest counts (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spread = "RANK" in os.environ
    if spread:
        dist.init_process_group("gloo")
    ranks = None if spread else 2
    rows = [row(name, ranks, options.microbatches, options.rounds) for name in options.schedules.split(",")]
    if not spread or dist.get_rank() == 0:
        place = f"rank 0 of {dist.get_world_size()} processes" if spread else "two ranks in one process"
        print(f"CPU of the host beside the graphs, {place}")
        print(tabulate(rows, HEAD[: len(rows[0])], floatfmt=".1f"))
    if spread:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
