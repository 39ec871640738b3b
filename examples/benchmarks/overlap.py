"""Measures how much communication pairs hide: a step whose pairs are one graph each, and the same
order with its pairs opened.

    python examples/benchmarks/overlap.py                      # two pipelines of two ranks, side by side
    torchrun --standalone --nproc-per-node 8 examples/benchmarks/overlap.py

Ranks of neighbouring pipelines exchange activations by an all-to-all in the forward of every layer,
and so gradients in its backward, as layers of experts do (examples/moe.py). Processes, messages,
functional collectives, compiled stages and the action loop are real. Two durations are fixed, so
that the result does not depend on the machine: the computation SLEEPS as in promise.py, and an
all-to-all completes no sooner than some milliseconds after its start. A third step, whose exchanges
have no such minimum, shows how much there was to hide. Prints milliseconds of the three steps
(medians; from the first start on any rank to the last end), and how much of the cost of exchanges
with opened pairs disappears with merged ones. What is in no pair cannot be hidden: the ends of a
schedule, where a rank has only forwards or only backwards to run.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from promise import BACKWARD, FORWARD, WEIGHT, WIDTH, forward, measured  # type: ignore[import-not-found]
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from zbcompile.schedules import Schedule, build
from zbcompile.schedules.ir.actions import flatten

SIDE_BY_SIDE = 2  # pipelines
LAYERS = 2  # of a stage
SHARE = 0.125  # of promise.py's times, for one layer


class Until(dist.Work):
    """A collective that completes no earlier than a given moment. `waited` receives the seconds that
    its rank waited."""

    def __init__(
        self, work: dist.Work, moment: float, waited: Callable[[float], object] = bool
    ) -> None:
        super().__init__()
        self.work, self.moment, self.waited = work, moment, waited

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        begin = time.monotonic()
        self.work.wait()
        time.sleep(max(0.0, self.moment - time.monotonic()))
        self.waited(time.monotonic() - begin)
        return True


class FixedLength(dist.ProcessGroup):
    """A group whose all-to-all takes `seconds` from its start."""

    # torch's stubs know neither this constructor nor that a group's name is a property.
    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.seconds, self.label = inner, 0.0, ""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.label

    def _set_group_name(self, name: str) -> None:  # torch tells a group its name (2.11-2.13)
        self.label = name

    def alltoall_base(self, *args: Any) -> Until:  # type: ignore[override]
        return Until(self.inner.alltoall_base(*args), time.monotonic() + self.seconds)


def with_fixed_length(inner: dist.ProcessGroup) -> FixedLength:
    """`inner` as a group that functional collectives find by its name."""
    dist.Backend.register_backend("known-length", lambda *_: FixedLength(inner), devices=["cpu"])
    members = dist.get_process_group_ranks(inner)
    return dist.new_group(members, backend="known-length", use_local_synchronization=True)  # type: ignore[return-value]


class Exchanging(nn.Module):
    """Layers that compute and exchange. The input depends on parameters, as an embedding's output
    does."""

    def __init__(self, layers: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group.group_name
        self.entry = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.entry[0] + self.entry[1]
        for weight in self.weights:
            x = collectives.all_to_all_single(forward(x, weight, SHARE), None, None, self.group)
        return x


def opened(schedule: Schedule) -> Schedule:
    """The same order without pairs."""
    return replace(schedule, orders=tuple(tuple(flatten(order)) for order in schedule.orders))


def stepper(schedule: Schedule, group: dist.ProcessGroup, mesh: Any) -> Callable[[], float]:
    """A function that runs a step and returns its seconds, from the first start on any rank to the
    last end."""
    x = torch.ones(schedule.microbatches * SIDE_BY_SIDE, WIDTH)
    model, count = Exchanging(LAYERS * schedule.stages, group), schedule.microbatches
    pipe = zbcompile.pipeline(
        model, schedule=schedule, microbatches=count, mesh=mesh, loss=lambda y, t: (y - t).mean()
    )
    pipe.compile(x, target=x)
    layers = [
        sum(name.startswith("weights") for name in stage.trained) for stage in pipe.program.stages
    ]
    assert layers == [LAYERS] * schedule.stages, f"{LAYERS} layers per stage, not {layers}"

    return partial(measured, partial(pipe.step, x, target=x))


def row(
    name: str, group: FixedLength, mesh: Any, microbatches: int, seconds: float, steps: int
) -> list[Any]:
    """The three steps of a schedule, run in turn."""
    merged = build(name, mesh["pp"].size(), microbatches)
    run_merged, run_opened = (
        stepper(schedule, group, mesh) for schedule in (merged, opened(merged))
    )
    kinds = ((run_opened, seconds), (run_merged, seconds), (run_opened, 0.0))
    times: list[list[float]] = [[], [], []]
    for _ in range(steps + 1):  # the first one warms up
        for runs, (run, length) in zip(times, kinds, strict=True):
            group.seconds = length
            runs.append(run())
    separate, together, free = (1e3 * median(runs[1:]) for runs in times)
    return [
        name,
        microbatches,
        separate,
        together,
        free,
        100 * (separate - together) / (separate - free),
    ]


def gated_mesh(
    gate_of: Callable[[dist.ProcessGroup], FixedLength], dimension: str, pipeline: int, ranks: int
) -> tuple[DeviceMesh, Any]:
    """A mesh of `pipeline` x `ranks` processes, and the gate through which collectives along
    `dimension` go."""
    rank, places = dist.get_rank(), torch.arange(pipeline * ranks).view(pipeline, ranks)
    inner = dist.new_group(places[rank // ranks].tolist(), use_local_synchronization=True)
    pp = dist.new_group(places[:, rank % ranks].tolist(), use_local_synchronization=True)
    gate = gate_of(inner)
    dist.Backend.register_backend("gated", lambda *_: gate, devices=["cpu"])
    gated = dist.new_group(
        dist.get_process_group_ranks(inner), backend="gated", use_local_synchronization=True
    )
    return DeviceMesh.from_group([pp, gated], "cpu", places, mesh_dim_names=("pp", dimension)), gate


def pipeline_step(
    model: nn.Module,
    mesh: DeviceMesh,
    x: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> Callable[[], object]:
    """A function that runs a step on `x`. Each sublayer of `model` has a part `between`; stages
    have equally many."""
    (dimension,) = set(mesh.mesh_dim_names or ()) - {"pp"}
    placements = {"*between": {dimension: "shard"}}
    pipe = zbcompile.pipeline(model, mesh=mesh, loss=loss, placements=placements, **options)
    pipe.compile(x, target=x)
    counts = [sum("between" in name for name in stage.trained) for stage in pipe.program.stages]
    assert set(counts) == {sum(counts) // len(counts)}, f"equal stages, not {counts}"
    return partial(pipe.step, x, target=x)


def alternating_medians(
    kinds: list[tuple[Callable[[], object], float]],
    gate: Any,
    steps: int,
    measure: Callable[..., list[float]],
) -> list[list[float]]:
    """Of each step, with exchanges of so many seconds, the medians of what `measure(step, gate)`
    finds in `steps` runs; the steps take turns, and a first run of each warms up."""
    times: list[list[list[float]]] = [[] for _ in kinds]
    for _ in range(steps + 1):
        for runs, (step, seconds) in zip(times, kinds, strict=True):
            gate.seconds = seconds
            runs.append(measure(step, gate))
    return [[median(of) for of in zip(*runs[1:], strict=True)] for runs in times]


def arguments(doc: str | None, schedules: str) -> argparse.ArgumentParser:
    """Adds the arguments of all benchmarks of overlap."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", default=schedules, help="default: %(default)s")
    parser.add_argument("--microbatches", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps of each kind (default: %(default)s)"
    )
    return parser


def on_processes(main: Callable[[], None], count: int) -> None:
    """Run `main` as one of the processes of torchrun; outside of it, start `count` of them, which
    do."""
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        subprocess.run([sys.executable, *launch, *sys.argv], check=True)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__, "dualpipe-v,1f1b-overlap")
    parser.add_argument(
        "--exchange", type=float, default=8.0, help="milliseconds of one (default: %(default)s)"
    )
    options = parser.parse_args()
    shape = (SIDE_BY_SIDE, dist.get_world_size() // SIDE_BY_SIDE)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "pp"))
    group = with_fixed_length(mesh["ep"].get_group())
    sizes = (options.microbatches, options.exchange / 1e3, options.steps)
    rows = [row(name, group, mesh, *sizes) for name in options.schedules.split(",")]
    if dist.get_rank() == 0:
        part, rest = (1e3 * SHARE * length for length in (FORWARD, BACKWARD + WEIGHT))
        print(
            f"{shape[1]} ranks; a layer computes {part:.1f} ms forward and {rest:.1f} ms backward,"
            " and exchanges"
        )
        print(f"for {options.exchange:g} ms in each direction; {LAYERS} layers per stage")
        print(tabulate(rows, HEAD, floatfmt=("", "", ".1f", ".1f", ".1f", ".0f")), flush=True)


HEAD = [
    "schedule",
    "microbatches",
    "pairs opened, ms",
    "pairs merged, ms",
    "exchanges of 0 ms",
    "hidden, %",
]

if __name__ == "__main__":
    on_processes(main, 4)
