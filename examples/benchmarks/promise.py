"""Compares the measured step with the simulated one, for five
schedules.

    python examples/benchmarks/promise.py                      # 2, 4 and 8 processes
    python examples/benchmarks/promise.py --optimizer          # with updates inside of the step
    python examples/benchmarks/promise.py --optimizer --zero 1 --ranks 8,16      # two replicas, which divide them
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/promise.py

Processes, gloo messages, compiled stages and the action loop are real. Only the computation is not:
the operations of this model SLEEP as long as the forward, the input gradient and the weight
gradient of a rank take in the profile of the zero bubble paper's 1.5B model (Qi et al., arXiv
2401.10241, table 9), times four, so that eight ranks fit on two cores. The time to start an
operation and to wake up from a sleep is no runtime's fault: it is measured beforehand, on all ranks
at the same time, and every sleep is shortened by it. A step is measured from its first start on any rank to
its last return. Two ratios: to a simulation in which messages take no time, and to one in which
they take as long as a measured bare message between two of the processes. Target: <= 1.03; below 1
under dualpipe-v, whose pairs hand over the forward's result before their backward begins, while the
simulation has both at the end of the pair. A process that still wakes up late counts as late, so
nothing else may run meanwhile; all schedules take turns, so that a disturbance of the machine
affects all of them. About 11 minutes.

With --optimizer a step ends with an update that sleeps as well, made inside of it with
`validate="after"`, and the simulation has its actions. Beside it stands the time per step of STEPS
steps one after the other, whose losses are read at the end, its ratio to what the simulation says
of a rank alone (`cost`), and the same if the loss is read after every step, which waits for all
ranks. With --zero half of the processes are a second replica: the simulation has REDUCE as
well. On a machine that does other work as well, longer sleeps (--scale) and a higher priority
(nice -n -10) help.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import register_flop_formula

import zbcompile
from zbcompile.program.updates import with_updates
from zbcompile.schedules import Costs, Timeline, build, simulate

# of the profile
SCALE = float(sys.argv[sys.argv.index("--scale") + 1]) if "--scale" in sys.argv else 4.0
# a rank's share, in seconds
FORWARD, BACKWARD, WEIGHT = (18.522e-3 * SCALE, 18.086e-3 * SCALE, 9.337e-3 * SCALE)
UPDATE = FORWARD / 4  # of a rank's parameters
STEPS = 20
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
WITH_UPDATES = ("1f1b", "zb-h2", "zb-v")
REPLICAS = ((), ("REDUCE",))  # what zero= adds
WIDTH = 16
late = 0.0  # seconds that an operation takes longer than its sleep


def pause(seconds: float) -> None:
    time.sleep(max(0.0, seconds - late))


@torch.library.custom_op("promise::forward", mutates_args=())
def forward(x: Tensor, weight: Tensor, share: float) -> Tensor:
    pause(FORWARD * share)
    return x * weight


@torch.library.custom_op("promise::input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, weight: Tensor, share: float) -> Tensor:
    pause(BACKWARD * share)
    return gradient * weight


@torch.library.custom_op("promise::weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, x: Tensor, share: float) -> Tensor:
    pause(WEIGHT * share)
    return (gradient * x).sum(0)


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    share = ctx.share  # type: ignore[attr-defined]
    return input_gradient(gradient, weight, share), weight_gradient(gradient, x, share), None


def _save(ctx: object, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.share = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(x, weight)  # type: ignore[attr-defined]


forward.register_fake(lambda x, weight, share: torch.empty_like(x))
input_gradient.register_fake(lambda gradient, weight, share: torch.empty_like(gradient))
weight_gradient.register_fake(lambda gradient, x, share: gradient.new_empty(gradient.shape[1:]))
forward.register_autograd(_backward, setup_context=_save)
for name, length in (
    ("forward", "FORWARD"),
    ("input_gradient", "BACKWARD"),
    ("weight_gradient", "WEIGHT"),
):
    register_flop_formula(
        getattr(torch.ops.promise, name)
    )(  # at the nominal 50 GFLOP/s of the compiler's CPU
        lambda x, y, share, *rest, length=length, **options: int(globals()[length] * share * 5e10)
    )


class Sleeper(nn.Module):
    """One layer per stage. The input depends on parameters, so that the first stage has an input
    gradient too."""

    def __init__(self, stages: int, ranks: int) -> None:
        super().__init__()
        self.entry = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.share = ranks / stages
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.entry[0] + self.entry[1]
        for weight in self.weights:
            x = forward(x, weight, self.share)
        return x


class SleepingSGD(torch.optim.SGD):
    """The update of a layer takes its share of `UPDATE`."""

    def __init__(self, params: Any, lr: float, share: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.share = share

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        layers = sum(p.grad is not None for group in self.param_groups for p in group["params"])
        pause(UPDATE * self.share * layers)
        super().step(closure)


Step = Callable[[], Any]


def prepared(schedule: str, microbatches: int, updates: bool, zero: int) -> Step:
    """A function that takes one step."""
    replicas = 2 if zero else 1
    ranks = dist.get_world_size() // replicas
    stages = build(schedule, ranks, microbatches).stages
    x = torch.ones(microbatches, WIDTH)
    model = Sleeper(stages, ranks)
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp")) if zero else None
    chosen: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, "mesh": mesh}
    pipe = zbcompile.pipeline(model, loss=lambda y, t: (y - t).mean(), **chosen)
    pipe.compile(x, target=x)
    layers = [
        sum(name.startswith("weights") for name in stage.trained) for stage in pipe.program.stages
    ]
    assert layers == [1] * stages, f"one layer per stage, not {layers}"
    if not updates:
        return lambda: pipe.step(x, target=x)
    options: dict[str, Any] = {
        "params": lambda name, _: "weights" in name,
        "share": model.share,
        "zero": zero,
    }
    optimizer = pipe.optimizer(SleepingSGD, lr=0.0, clip=1e9, validate="after", **options)

    def step_with_update() -> Tensor:
        loss: Tensor = pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step_with_update


def measured(step: Step) -> float:
    """Seconds from the first start on any rank to the last end."""
    dist.barrier()
    begin = time.monotonic()
    step()
    span = torch.tensor(
        [-begin, time.monotonic()], dtype=torch.float64
    )  # one clock for all processes
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return float(span.sum())


def repeat(step: Step, read: Callable[[Tensor], Tensor | float]) -> None:
    """Runs STEPS steps and applies `read` to each loss."""
    losses = [read(step()) for _ in range(STEPS)]
    assert all(map(float, losses))


def lateness(calls: int = 40) -> float:
    """Returns the seconds by which operations exceed their sleeps, the median over all ranks."""
    x, delays = torch.ones(1, WIDTH), []
    for _ in range(calls):
        begin = time.perf_counter()
        forward(x, x[0], 0.25)
        delays.append(time.perf_counter() - begin - FORWARD / 4)
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, median(delays))
    return median(everyone)


def message_seconds(trips: int = 50) -> float:
    """Seconds that a bare message takes from one process to another: half of a round trip between
    the first two."""
    rank, token, delays = dist.get_rank(), torch.zeros(WIDTH), []
    for _ in range(trips if rank < 2 else 0):
        begin = time.perf_counter()
        first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        first(token, 1 - rank)
        then(token, 1 - rank)
        delays.append(time.perf_counter() - begin)
    return median(delays) / 2 if delays else 0.0


def promised(schedule: str, microbatches: int, comm: float, updates: bool, zero: int) -> Timeline:
    """Returns the simulated step, in seconds, in which a message takes `comm`. `makespan` includes
    an optimizer barrier."""
    ranks = dist.get_world_size() // (2 if zero else 1)
    order = build(schedule, ranks, microbatches)
    share = ranks / order.stages
    costs = Costs.uniform(
        order.stages, FORWARD * share, BACKWARD * share, WEIGHT * share, comm=comm
    )
    if updates:
        order = with_updates(order, (*REPLICAS[zero], "OPT"))
        # of the layer of a stage each replica updates as much
        costs = replace(costs, optimizer=(UPDATE * share,) * order.stages)
    return simulate(order, costs)


def launch(script: str, ranks: str) -> None:
    """Run a benchmark with each number of processes in turn."""
    for case in ranks.split(","):
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", case]
        subprocess.run([sys.executable, *start, script, *sys.argv[1:]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        default="2,4,8",
        help="without torchrun: how many processes (default: %(default)s)",
    )
    parser.add_argument(
        "--schedules",
        help=f"default: {', '.join(SCHEDULES)}; with updates {', '.join(WITH_UPDATES)}",
    )
    parser.add_argument("--optimizer", action="store_true", help="update inside of the step")
    parser.add_argument(
        "--zero", type=int, choices=(0, 1), default=0, help="two replicas divide the optimizer"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="the medians count (default: %(default)s)"
    )
    parser.add_argument(
        "--best", action="store_true", help="the best round counts: on a machine that is not quiet"
    )
    parser.add_argument(
        "--scale", type=float, default=4, help="of the profile's times (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help=f"of {STEPS} steps one after the other"
    )
    parser.add_argument(
        "--per-rank", default="2,4", help="microbatches per rank (default: %(default)s)"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch(__file__, options.ranks)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    global late
    late = lateness()
    ranks, comm = dist.get_world_size() // (2 if options.zero else 1), message_seconds()
    pick = min if options.best else median
    usual = WITH_UPDATES if options.optimizer else SCHEDULES
    names = options.schedules.split(",") if options.schedules else usual
    chosen = [(name, ranks * int(n)) for n in options.per_rank.split(",") for name in names]
    steps = {case: prepared(*case, options.optimizer, options.zero) for case in chosen}
    rounds = [
        {case: measured(step) for case, step in steps.items()} for _ in range(options.rounds + 1)
    ]
    rows = []
    for schedule, microbatches in chosen:
        per_round = [case[schedule, microbatches] for case in rounds[1:]]  # the first one warms up
        seconds = pick(per_round)
        said = options.optimizer, options.zero
        alone, with_messages = (
            promised(schedule, microbatches, case, *said) for case in (0.0, comm)
        )
        times = [
            1e3 * alone.makespan,
            1e3 * seconds,
            seconds / alone.makespan,
            seconds / with_messages.makespan,
        ]
        if options.optimizer:
            for read in (Tensor.detach, float):
                repeated = partial(repeat, steps[schedule, microbatches], read)
                runs = [measured(repeated) / STEPS for _ in range(options.repeats)]
                times += [1e3 * pick(runs), pick(runs) / with_messages.cost]
            times.append(max(per_round) / min(per_round) - 1)
        rows.append([schedule, ranks, microbatches, *times])
    if dist.get_rank() == 0:
        head = [
            "schedule",
            "ranks",
            "microbatches",
            "simulated ms",
            "measured ms",
            "ratio",
            "with hops",
        ]
        head += [
            f"ms of {STEPS}",
            "to cost",
            "losses read",
            "to cost",
            "spread",
        ] * options.optimizer
        count = dist.get_world_size()
        print(
            f"of {count} processes: a sleep is {1e3 * late:.2f} ms late, a bare message takes"
            f" {1e3 * comm:.2f} ms"
        )
        digits = ("", "", "", ".1f", ".1f", ".3f", ".3f", ".1f", ".3f", ".1f", ".3f", ".3f")
        print(tabulate(rows, head, floatfmt=digits[: len(head)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
