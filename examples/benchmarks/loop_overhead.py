"""Measures the CPU microseconds of the host per action, without the operations of its graph.

    python examples/benchmarks/loop_overhead.py                                              # in one process
    torchrun --standalone --nproc-per-node 2 examples/benchmarks/loop_overhead.py            # over messages
    python examples/benchmarks/loop_overhead.py --device cuda [--cuda-graphs]                # the host of a GPU

The stages are tiny, so a step is almost all overhead; the time inside the graphs is subtracted.
Steps with few and with many microbatches are compared: the difference is what one more action costs
(sends and receives are actions too), the rest is what a step costs next to its actions (checking the
batch and the model, sharing the loss). The look at the Python values that forward has read is shown
alone, and as a share of the small step with its graphs. Over messages, a bare exchange through
torch.distributed is measured as well (two ranks that send each other tensors as large as ours,
nothing else), and our cost without it. Time is CPU time of the calling thread. Target: below 40
microseconds per action.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.engine.stage import CompiledStage
from zbcompile.schedules.ir.actions import MESSAGES, flatten

sys.path.insert(0, str(Path(__file__).parents[1]))
from devices import add_device, device_of_rank, start_group

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


class Contender:
    """A pipeline with clocks around its graphs: its actions on this process's ranks, how many of
    them are messages, and the CPU seconds of its steps without the graphs."""

    def __init__(
        self,
        schedule: str,
        ranks: int | None,
        microbatches: int,
        device: torch.device,
        graphs: bool,
    ) -> None:
        self.x, self.seconds = torch.randn(microbatches, WIDTH, device=device), list[float]()
        self.pipe = zbcompile.pipeline(
            Tiny(8).to(device),
            schedule=schedule,
            microbatches=microbatches,
            loss=F.mse_loss,
            ranks=ranks,
            cuda_graphs=graphs,
        )
        self.pipe.compile(self.x, target=self.x)
        executable = list(self.pipe._compiled.steps.plans.values())[-1]
        state = self.pipe._compiled.steps.entries[0].state
        assert state is not None
        self.guards, self.guarded, self.whole = Timed(state.change), list[float](), list[float]()
        state.change = self.guards  # type: ignore[method-assign]
        self.clocks = time_graphs(executable.first.stages)  # type: ignore[arg-type]
        _, plans = executable.ordered()
        for plan in plans:
            for kind, run in plan.merged.items():
                self.clocks.append(TimedPair(run))
                plan.merged[kind] = self.clocks[-1]  # type: ignore[index]
        programs = [executable.program.lowered.orders[plan.rank] for plan in plans]
        actions = [action for program in programs for action in flatten(program)]
        self.actions, self.messages = len(actions), sum(action.op in MESSAGES for action in actions)

    def step(self) -> None:
        for clock in (*self.clocks, self.guards):
            clock.seconds = 0.0
        begin = time.thread_time()
        self.pipe.step(self.x, target=self.x)
        self.whole.append(time.thread_time() - begin)
        self.seconds.append(self.whole[-1] - sum(clock.seconds for clock in self.clocks))
        self.guarded.append(self.guards.seconds)

    @property
    def microseconds(self) -> float:
        """The cheapest step but for the first three."""
        return 1e6 * min(self.seconds[3:])


class Bare:
    """Measures one end of a message between two neighbours that use torch.distributed alone."""

    COUNT = 32

    def __init__(self, device: torch.device) -> None:
        self.peer = dist.get_rank() ^ 1
        self.sent, self.arrived = torch.randn(2, 1, WIDTH, device=device)
        self.seconds: list[float] = []

    def step(self) -> None:
        if self.peer >= dist.get_world_size():
            return
        begin = time.thread_time()
        for tag in range(self.COUNT):
            if self.peer % 2:
                self._send(tag)
            self._receive(tag)
            if not self.peer % 2:
                self._send(tag)
        self.seconds.append(time.thread_time() - begin)

    def _send(self, tag: int) -> None:
        dist.isend(self.sent, self.peer, tag=tag).wait()  # type: ignore[union-attr]

    def _receive(self, tag: int) -> None:
        dist.irecv(self.arrived, self.peer, tag=tag).wait()  # type: ignore[union-attr]

    @property
    def microseconds(self) -> float:
        return 1e6 * min(self.seconds, default=float("nan")) / (2 * self.COUNT)


def row(
    schedule: str, ranks: int | None, device: torch.device, options: argparse.Namespace
) -> list[Any]:
    """The costs of a schedule as the table shows them. All take turns, because the machine
    drifts."""
    counts = options.microbatches, 3 * options.microbatches
    few, many = (Contender(schedule, ranks, count, device, options.cuda_graphs) for count in counts)
    bare = Bare(device) if ranks is None else None
    for _ in range(options.rounds + 3):
        few.step()
        many.step()
        if bare:
            bare.step()
    actions, messages = many.actions - few.actions, many.messages - few.messages
    per_action = (many.microseconds - few.microseconds) / actions
    guards, step_time = 1e6 * min(few.guarded[3:]), 1e6 * min(few.whole[3:])
    row = [
        schedule,
        per_action,
        few.microseconds - per_action * few.actions,
        guards,
        100 * guards / step_time,
    ]
    if bare:
        row += [
            100 * messages / actions,
            bare.microseconds,
            per_action - bare.microseconds * messages / actions,
        ]
    few.pipe.close()
    many.pipe.close()
    return row


HEAD = [
    "schedule",
    "us / action",
    "us / step beside",
    "us / look at Python",
    "% of the step",
    "messages, % of actions",
    "us / bare message",
    "ours, us / action",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedules", default="1f1b,zb-h1,zb-v,dualpipe-v", help="default: %(default)s"
    )
    parser.add_argument(
        "--microbatches", type=int, default=8, help="and three times as many (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=60, help="steps; the cheapest counts (default: %(default)s)"
    )
    parser.add_argument("--cuda-graphs", action="store_true", help="passes as CUDA graphs")
    add_device(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, spread = device_of_rank(options.device), "RANK" in os.environ
    if spread:
        start_group(device)
    ranks = None if spread else 2
    rows = [row(name, ranks, device, options) for name in options.schedules.split(",")]
    if not spread or dist.get_rank() == 0:
        place = (
            f"rank 0 of {dist.get_world_size()} processes" if spread else "two ranks in one process"
        )
        print(f"CPU of the host beside the graphs, {place}")
        print(tabulate(rows, HEAD[: len(rows[0])], floatfmt=".1f"))
    if spread:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
