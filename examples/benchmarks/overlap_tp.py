"""Measures how much of tensor parallelism's exchanges pairs hide. pp2 x tp2, DTensor, Colwise and
Rowwise.

    python examples/benchmarks/overlap_tp.py                 # four processes

Processes, messages, DTensor's collectives, compiled stages and the action loop are real. Two
durations are fixed, so that the result does not depend on the machine: between its columns and its
rows each sublayer SLEEPS as in promise.py, and an all-reduce completes no sooner than some share of
a sublayer's weight gradient after its start. Sublayers take a wider input than they give, so that
all-reduces of the backward are known by their size.

For each schedule: milliseconds of a step without pairs (its own ones opened, `pairs="given"`), with
the pairs that it has or that the compiler forms (medians, in turn; from the first start on any rank
to the last end), and without pairs with exchanges of no minimal length. Hidden is 1 - (time that
ranks stand in waits of all-reduces) / (number of these x their length), of those of the forward (F)
and of the backward (B). `--simulate 4 --schedules zb-h1` prints what the lowering foresees, for any
number of ranks. torch's rows are its own 1F1B with the same sublayers as eager DTensors.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from overlap import (  # type: ignore[import-not-found]
    FixedLength,
    Until,
    alternating_medians,
    arguments,
    gated_mesh,
    on_processes,
    opened,
    pipeline_step,
)
from promise import BACKWARD, FORWARD, WEIGHT, WIDTH, forward, measured  # type: ignore[import-not-found]
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zbcompile.compiler.paired_schedule import with_pairs
from zbcompile.passes.cost.hardware import Connection, Hardware
from zbcompile.schedules import Costs, Schedule, build, simulate
from zbcompile.schedules.ir.actions import BW, Action, Step, flatten

# of a microbatch; of the model; of promise.py's times for one sublayer
ROWS, SUBLAYERS, SHARE = (2, 8, 0.5)
WIDER = 2 * WIDTH
# elements of a sublayer's all-reduce in the forward, and in the backward
SIZES = (ROWS * WIDTH, ROWS * WIDER)


class Gate(FixedLength):  # type: ignore[misc]
    """A group whose all-reduces of a sublayer take `seconds` from their start. `count` and `waited`
    are of those of the forward and of the backward: how many, and how long this rank stood in waits
    for them."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self.count, self.waited = [0, 0], [0.0, 0.0]

    def allreduce(self, tensors: list[Tensor], *args: Any) -> Until | dist.Work:
        work, size = self.inner.allreduce(tensors, *args), tensors[0].numel()
        if size not in SIZES:
            return work
        op = SIZES.index(size)
        self.count[op] += 1
        return Until(work, time.monotonic() + self.seconds, partial(self._note, op))

    def _note(self, op: int, seconds: float) -> None:
        self.waited[op] += seconds

    def read_counters(self) -> list[float]:
        measured, self.count, self.waited = [*self.count, *self.waited], [0, 0], [0.0, 0.0]
        return measured


def _delegated(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


for _name in ("allgather", "_allgather_base", "broadcast", "barrier", "scatter", "gather"):
    setattr(Gate, _name, _delegated(_name))


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows = (
            nn.Linear(WIDER, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.between = nn.Parameter(torch.ones(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(
            forward(self.columns(nn.functional.pad(x, (0, WIDTH))), self.between, SHARE)
        )


class Model(nn.Sequential):
    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, WIDTH), *(Sublayer() for _ in range(SUBLAYERS)))
        styles = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
        plan = {
            f"{i + 1}.{name}": style for i in range(SUBLAYERS) for name, style in styles.items()
        }
        parallelize_module(self, mesh, plan)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).mean()


def ours(
    mesh: DeviceMesh, schedule: str | Schedule, microbatches: int, pairs: str, seconds: float
) -> Callable[[], object]:
    """A step of our pipeline."""
    x = torch.ones(microbatches * ROWS, WIDTH)
    hardware = replace(Hardware.find("cpu-core"), within=Connection(seconds, 1e12))
    options = {
        "schedule": schedule,
        "microbatches": microbatches,
        "hardware": hardware,
        "pairs": pairs,
    }
    step: Callable[[], object] = pipeline_step(Model(mesh["tp"]), mesh, x, loss_of, **options)
    return step


def torchs(mesh: DeviceMesh, microbatches: int) -> Callable[[], object]:
    """A step of torch's 1F1B with eager DTensors."""
    model, rank = Model(mesh["tp"]), mesh["pp"].get_local_rank()
    x, cut = torch.ones(microbatches * ROWS, WIDTH), 1 + SUBLAYERS // 2
    half = nn.Sequential(*(list(model)[:cut] if rank == 0 else list(model)[cut:]))
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
    return (lambda: schedule.step(x)) if rank == 0 else lambda: schedule.step(target=x)


def time_and_hidden(step: Callable[[], object], gate: Gate) -> list[float]:
    """Milliseconds of a step, and the percentages of its exchanges hidden: of the forward, and of
    the backward."""
    gate.read_counters()
    seconds = measured(step)
    counters = torch.tensor(gate.read_counters(), dtype=torch.float64)
    dist.all_reduce(counters)
    total, waited = (counters[:2] * gate.seconds).tolist(), counters[2:].tolist()
    return [
        1e3 * seconds,
        *(
            100 * (1 - w / all_) if all_ else float("nan")
            for w, all_ in zip(waited, total, strict=True)
        ),
    ]


def opened_order(name: str, microbatches: int, ranks: int = 2) -> Schedule:
    """The order of a schedule, with its pairs opened."""
    return opened(build(name, ranks, microbatches))


def row(
    mesh: DeviceMesh, gate: Gate, options: argparse.Namespace, name: str, share: float
) -> list[Any]:
    """The steps of a schedule: without pairs, with pairs, and without pairs with exchanges of no
    length."""
    seconds, count = share * WEIGHT * SHARE, options.microbatches
    if name == "torch":
        kinds = [(torchs(mesh, count), seconds)]
    else:
        separate = ours(mesh, opened_order(name, count), count, "given", seconds)
        kinds = [
            (separate, seconds),
            (ours(mesh, name, count, "auto", seconds), seconds),
            (separate, 0.0),
        ]
    measured = alternating_medians(kinds, gate, options.steps, time_and_hidden)
    separate_, paired, free = (*measured, NONE, NONE)[:3]
    return [name, share, separate_[0], paired[0], free[0], *separate_[1:], *paired[1:]]


def waits(costs: Costs, step: Step) -> float:
    """Returns how long a rank waits during `step` for collectives that nothing hides."""
    actions = flatten((step,))
    computing = sum(costs.time(op, stage) - costs.exchange(op, stage) for op, stage, _ in actions)
    if isinstance(step, Action):
        return costs.time(step.op, step.stage) - computing
    return costs.pair_time(*step.first[:2], *step.second[:2]) - computing


def simulated(
    name: str, ranks: int, microbatches: int, share: float, first: float = 0.0
) -> list[Any]:
    """The same row as the lowering foresees it, for two sublayers a rank on any number of ranks.
    What a pair waits for counts as B's. `first` is the share of a backward's exchanges that it
    begins with: alone, it has nothing to compute before."""
    schedule = build(name, ranks, microbatches)
    size, stages = 2 * ranks // schedule.stages, schedule.stages
    forward, backward, weight = (1e3 * SHARE * size * part for part in (FORWARD, BACKWARD, WEIGHT))
    per_stage = (share * weight,) * stages
    free = Costs((forward,) * stages, (backward,) * stages, (weight,) * stages)
    slower, later = ((part + per_stage[0],) * stages for part in (forward, backward))
    costs = Costs(
        slower, later, free.weight, forward_exchange=per_stage, backward_exchange=per_stage
    )
    total = sum(per_stage) * microbatches
    measured: list[Any] = []
    for order in (opened(schedule), with_pairs(schedule, costs)):
        steps = [step for rank in order.orders for step in rank]
        lone = [
            sum(
                waits(costs, s)
                for s in steps
                if flatten((s,))[0].op == "F" and isinstance(s, Action)
            )
        ]
        begun = first * per_stage[0] * sum(isinstance(s, Action) and s.op == BW for s in steps)
        hidden = [
            100 * (1 - part / total)
            for part in (*lone, sum(waits(costs, s) for s in steps) - lone[0] + begun)
        ]
        measured.append((simulate(order, costs).makespan, hidden))
    (separate, before), (paired, after) = measured
    return [
        name,
        share,
        separate,
        paired,
        simulate(opened(schedule), free).makespan,
        *before,
        *after,
    ]


NONE = [float("nan")] * 3


def main(options: argparse.Namespace) -> None:
    mesh, gate = gated_mesh(Gate, "tp", 2, 2)
    table = [row(mesh, gate, options, *case) for case in cases(options)]
    if dist.get_rank() == 0:
        parts = [1e3 * SHARE * length for length in (FORWARD, BACKWARD, WEIGHT)]
        print(
            "a sublayer computes "
            + ", ".join(f"{part:.1f} ms {op}" for part, op in zip(parts, "FBW", strict=True))
        )
        show(table)


def cases(options: argparse.Namespace) -> Iterable[tuple[str, float]]:
    names = [
        name for name in options.schedules.split(",") if not (options.simulate and name == "torch")
    ]
    return product(names, map(float, options.exchanges.split(",")))


def show(table: list[list[Any]]) -> None:
    heads = ["schedule", "exchange / W", "apart, ms", "pairs, ms", "0 ms exchanges"]
    heads += [f"{op} hidden {how}, %" for how in ("apart", "in pairs") for op in "FB"]
    print(tabulate(table, heads, floatfmt=("", "g", *[".0f"] * 7)), flush=True)


if __name__ == "__main__":
    parser = arguments(__doc__, "zb-h1,zb-v,dualpipe-v,1f1b-overlap,torch")
    parser.add_argument(
        "--exchanges", default="0.5,2", help="times a sublayer's W (default: %(default)s)"
    )
    parser.add_argument(
        "--simulate",
        type=int,
        metavar="RANKS",
        help="no processes: what the lowering foresees for ours",
    )
    options_ = parser.parse_args()
    if options_.simulate:
        show(
            [
                simulated(name, options_.simulate, options_.microbatches, share)
                for name, share in cases(options_)
            ]
        )
    else:
        on_processes(partial(main, options_), 4)
