"""How much of tensor parallelism's exchanges hides behind weight gradients? pp2 x tp2, DTensor, Colwise and Rowwise.

    python examples/benchmarks/overlap_tp.py                 # four processes

Processes, messages, DTensor's collectives, compiled stages and the action loop are real. Two durations are fixed, so
that the result does not depend on the machine: between its columns and its rows each sublayer SLEEPS as in promise.py,
and an all-reduce completes no sooner than some share of a sublayer's weight gradient after its start. Sublayers take a
wider input than they give, so that all-reduces of the backward are known by their size.

For each schedule: milliseconds of a step with B and W apart (`pairs="given"`), with the pairs that the compiler forms
(medians, in turn; from the first start on any rank to the last end), and with exchanges of no minimal length. Hidden
is 1 - (time that ranks stand in waits of the backward's all-reduces) / (number of these x their length), of the median
step. torch's rows are its own 1F1B with the same sublayers as eager DTensors.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from overlap import KnownLength, Until  # type: ignore[import-not-found]
from promise import BACKWARD, FORWARD, WEIGHT, WIDTH, forward  # type: ignore[import-not-found]
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbcompile

ROWS, SUBLAYERS, SHARE = 2, 8, 0.5  # of a microbatch; of the model; of promise.py's times for one sublayer
WIDER = 2 * WIDTH


class Gate(KnownLength):  # type: ignore[misc]
    """A group whose all-reduces of a sublayer take `seconds` from their start; counts those of the backward."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self.count, self.waited = 0, 0.0

    def allreduce(self, tensors: list[Tensor], *args: Any) -> Until:
        work, backward = self.inner.allreduce(tensors, *args), tensors[0].numel() == ROWS * WIDER
        length = self.seconds if tensors[0].numel() in (ROWS * WIDTH, ROWS * WIDER) else 0.0
        self.count += backward
        return Until(work, time.monotonic() + length, self._note if backward else bool)

    def _note(self, seconds: float) -> None:
        self.waited += seconds

    def taken(self) -> tuple[int, float]:
        found, self.count, self.waited = (self.count, self.waited), 0, 0.0
        return found


def _delegated(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


for _name in ("allgather", "_allgather_base", "broadcast", "barrier", "scatter", "gather"):
    setattr(Gate, _name, _delegated(_name))


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rows = nn.Linear(WIDER, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = nn.Parameter(torch.ones(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(forward(self.columns(nn.functional.pad(x, (0, WIDTH))), self.between, SHARE))


class Model(nn.Sequential):
    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, WIDTH), *(Sublayer() for _ in range(SUBLAYERS)))
        parallelize_module(self, mesh, {"*.columns": ColwiseParallel(), "*.rows": RowwiseParallel()})


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).mean()


def ours(mesh: DeviceMesh, schedule: str, microbatches: int, pairs: str, seconds: float) -> Callable[[], object]:
    """A step of our pipeline."""
    x = torch.ones(microbatches * ROWS, WIDTH)
    pipe = zbcompile.pipeline(
        Model(mesh["tp"]),
        mesh=mesh,
        schedule=schedule,
        microbatches=microbatches,
        loss=loss_of,
        placements={"*between": {"tp": "shard"}},
        channels=f"tp={seconds}:1TB",
        pairs=pairs,
    )
    pipe.compile(x, target=x)
    counts = [sum("columns" in name for name in stage.trained) for stage in pipe.program.stages]
    assert set(counts) == {SUBLAYERS // len(counts)}, f"equal stages, not {counts}"
    return partial(pipe.step, x, target=x)


def torchs(mesh: DeviceMesh, microbatches: int) -> Callable[[], object]:
    """A step of torch's 1F1B with eager DTensors."""
    model, rank = Model(mesh["tp"]), mesh["pp"].get_local_rank()
    x, cut = torch.ones(microbatches * ROWS, WIDTH), 1 + SUBLAYERS // 2
    half = nn.Sequential(*(list(model)[:cut] if rank == 0 else list(model)[cut:]))
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
    return (lambda: schedule.step(x)) if rank == 0 else lambda: schedule.step(target=x)


def measured(step: Callable[[], object], gate: Gate) -> tuple[float, float]:
    """Seconds from the first start on any rank to the last end, and the share of the backward's exchanges hidden."""
    dist.barrier()
    gate.taken()
    begin = time.monotonic()
    step()
    span = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)  # one clock for all processes
    dist.all_reduce(span, dist.ReduceOp.MAX)
    found = torch.tensor(gate.taken(), dtype=torch.float64)
    dist.all_reduce(found)
    whole = float(found[0]) * gate.seconds
    return float(span.sum()), 1 - float(found[1]) / whole if whole else 0.0


def rows(mesh: DeviceMesh, gate: Gate, options: argparse.Namespace) -> list[list[Any]]:
    weight, count = WEIGHT * SHARE, options.microbatches
    found = []
    for name in options.schedules.split(","):
        for share in map(float, options.exchanges.split(",")):
            seconds = share * weight
            if name == "torch":
                kinds = [(torchs(mesh, count), seconds)]
            else:
                apart, paired = (ours(mesh, name, count, pairs, seconds) for pairs in ("given", "auto"))
                kinds = [(apart, seconds), (paired, seconds), (apart, 0.0)]
            times: list[list[tuple[float, float]]] = [[] for _ in kinds]
            for _ in range(options.steps + 1):  # the first one warms up
                for each, (step, length) in zip(times, kinds, strict=True):
                    gate.seconds = length
                    each.append(measured(step, gate))
            middle = [(1e3 * median(t for t, _ in each[1:]), 100 * median(h for _, h in each[1:])) for each in times]
            middle += [(float("nan"), float("nan"))] * (3 - len(middle))
            (apart_ms, apart_hidden), (paired_ms, paired_hidden), (free_ms, _) = middle
            found.append([name, share, apart_ms, paired_ms, free_ms, apart_hidden, paired_hidden])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="zb-h1,zb-v,torch", help="default: %(default)s")
    parser.add_argument("--exchanges", default="0.5,2", help="times a sublayer's W (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each kind (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        subprocess.run([sys.executable, *launch, __file__, *sys.argv[1:]], check=True)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    places = torch.arange(4).view(2, 2)  # pp, tp
    inner = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    pp = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    gate = Gate(inner)
    dist.Backend.register_backend("gated", lambda *_: gate, devices=["cpu"])
    tp = dist.new_group(dist.get_process_group_ranks(inner), backend="gated", use_local_synchronization=True)
    mesh = DeviceMesh.from_group([pp, tp], "cpu", places, mesh_dim_names=("pp", "tp"))
    table = rows(mesh, gate, options)
    if rank == 0:
        parts = [1e3 * SHARE * length for length in (FORWARD, BACKWARD, WEIGHT)]
        print("a sublayer computes " + ", ".join(f"{part:.1f} ms {op}" for part, op in zip(parts, "FBW", strict=True)))
        print(tabulate(table, HEAD, floatfmt=("", "g", ".0f", ".0f", ".0f", ".0f", ".0f")), flush=True)
    dist.destroy_process_group()


HEAD = ["schedule", "exchange / W", "apart, ms", "pairs, ms", "0 ms exchanges", "hidden apart, %", "hidden, %"]

if __name__ == "__main__":
    main()
