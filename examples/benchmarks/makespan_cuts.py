"""What moved cuts gain, predicted and then measured, beside cuts into equal parts.

    python examples/benchmarks/makespan_cuts.py                     # 4 and 8 processes, about 15 minutes
    python examples/benchmarks/makespan_cuts.py --ranks 2 --rounds 2
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/makespan_cuts.py

A model is captured, cut in both ways and compiled; processes, gloo messages, the compiled stages and the action loop
are real. Only its layers do not compute: they SLEEP, as those of promise.py do, whose way to measure this is, too; F, B
and W of a layer take the same time. Six layers a rank; the cases:

* head: an output layer that takes as long as four layers; cuts between layers only;
* head, inside: the same, but a layer can be cut in four places;
* head in 1: the same as head, but a rank may hold no more than what a microbatch keeps on all ranks together, which is
  what 1F1B needs if they keep equally much;
* .6: no head; a rank may hold .6 of that. Not on two ranks, where no cuts hold so little, and not for names, which
  need what they need;
* .6, inside: the same, but a layer can be cut in four places.

A name keeps its order, and `balance="makespan"` moves its cuts. "auto", with one stage a rank, searches the order for
both: for equal cuts, which are given by their names, and together with the cuts that it moves.

"gain" is the share of the step with equal cuts (within the same limit) that the moved cuts save, predicted and
measured; "ratio" is measured / predicted, for equal and for moved cuts; target <= 1.03, on a machine that does nothing
else. Layouts take turns, the medians count. `cut_gains.py` predicts more cases, of a Llama.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import promise  # type: ignore[import-not-found]

import zbcompile
from zbcompile import Hardware
from zbcompile.compiler.stage_price import running_of
from zbcompile.passes.machine.hardware import Connection
from zbcompile.prediction.predict import predicted_costs, prices_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, simulate
from zbcompile.schedules.execution.memory import most_beside, with_messages

promise.BACKWARD = promise.WEIGHT = promise.FORWARD
LAYERS, HEAD, ROWS = 6, 4, 64  # layers a rank, layers that the head takes as long as, rows of a microbatch
LESS = 0.6  # of the memory


class Sleeper(nn.Module):
    """Layers of so many equal parts, and a head that no cut divides."""

    def __init__(self, ranks: int, parts: int, head: int) -> None:
        super().__init__()
        self.entry = nn.ParameterList(nn.Parameter(torch.ones(promise.WIDTH)) for _ in range(2))
        shares = [1 / LAYERS / parts] * (ranks * LAYERS * parts) + [head / LAYERS] * (head > 0)
        self.shares = {f"weights.{i}": share for i, share in enumerate(shares)}
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(promise.WIDTH)) for _ in shares)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.entry[0] + self.entry[1]
        for weight, share in zip(self.weights, self.shares.values(), strict=True):
            x = promise.forward(x, weight, share).sin()  # which keeps as much for B as W needs besides
        return x


class Case(NamedTuple):
    name: str
    parts: int
    head: int
    memory: float | None = None


CASES = (
    Case("head", 1, HEAD),
    Case("head, inside", 4, HEAD),
    Case("head in 1", 1, HEAD, 1.0),
    Case(".6", 1, 0, LESS),
    Case(".6, inside", 4, 0, LESS),
)


class Cut(NamedTuple):
    """A pipeline, what its step should take, and the batch."""

    pipe: zbcompile.Pipeline
    costs: Costs
    batch: Tensor

    @property
    def predicted(self) -> float:
        return float(simulate(self.pipe.program.schedule, self.costs).makespan)

    def step(self) -> Any:
        return self.pipe.step(self.batch, target=self.batch)


def cut(case: Case, asked: argparse.Namespace, **options: Any) -> Cut:
    ranks, comm = dist.get_world_size(), asked.comm
    batch, model = torch.ones(ROWS * asked.microbatches, promise.WIDTH), Sleeper(ranks, case.parts, case.head)
    pipe = zbcompile.pipeline(
        model,
        microbatches=asked.microbatches,
        loss=lambda y, t: (y - t).mean(),
        recompute="off",
        hardware=Hardware("sleeps", {"float32": 5e10}, 1e15, within=Connection(comm, 1e15)),  # FLOP/s as in promise.py
        search_seconds=asked.seconds,
        **options,
    )
    pipe.compile(batch, target=batch)
    shares = [sum(model.shares.get(name, 0.0) for name in stage.trained) for stage in pipe.program.stages]
    times = tuple(promise.FORWARD * share for share in shares)
    return Cut(pipe, Costs(times, times, times, comm=comm), batch)


def both(case: Case, schedule: str, asked: argparse.Namespace) -> tuple[Cut, Cut]:
    """With equal and with moved cuts, within the same limit of memory."""
    memory: dict[str, Any] = {}
    plain = cut(case, asked, schedule="zb-h1")
    if case.memory is not None:
        memory["memory"] = int(case.memory * kept(plain.pipe) + beside(plain.pipe.program))
    if schedule == "auto":
        given = cut(case, asked, schedule="auto", balance=plain.pipe.program.cuts.names, **memory)
        return given, cut(case, asked, schedule="auto", chunks=1, **memory)
    equal, moved = (cut(case, asked, schedule=schedule, balance=each, **memory) for each in ("flops", "makespan"))
    return equal, moved


def kept(pipe: zbcompile.Pipeline) -> int:
    """Bytes that a microbatch keeps on all ranks together; a model that sleeps has hardly any parameters."""
    return sum(stage.crossing.kept for stage in pipe.program.stages)


def beside(program: Program) -> float:
    """Bytes of the pass that runs and of buffers for messages, on the rank that needs most."""
    costs, placement = predicted_costs(program), program.schedule.placement
    passes = most_beside(placement, with_messages(costs, placement), running_of(prices_of(program)))
    return max(passes) + 2 * max(costs.message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8", help="without torchrun: how many processes (default: %(default)s)")
    parser.add_argument("--schedules", default="zb-h1,auto", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20, help="of each search of auto (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the medians count (default: %(default)s)")
    parser.add_argument("--per-rank", type=int, default=2, help="microbatches per rank (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=4, help="of the times in promise.py (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        promise.launch(__file__, options.ranks)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    promise.late = promise.lateness()
    rows = list(compare(options))
    if dist.get_rank() == 0:
        many = f"{dist.get_world_size()} processes, {options.per_rank} microbatches a rank"
        print(f"{many}; an operation is {1e3 * promise.late:.2f} ms late")
        print(tabulate(rows, HEADERS, floatfmt=FORMATS), flush=True)
    dist.destroy_process_group()


HEADERS = ("case", "schedule", "equal s", "moved s", "gain", "measured", "measured", "gain", "ratio", "ratio")
FORMATS = ("", "", ".3f", ".3f", ".1%", ".3f", ".3f", ".1%", ".3f", ".3f")


def compare(options: argparse.Namespace) -> Iterator[list[Any]]:
    hops = [0.0] * dist.get_world_size()
    dist.all_gather_object(hops, promise.hop())
    options.comm, options.microbatches = max(hops), options.per_rank * dist.get_world_size()
    cases = [case for case in CASES if dist.get_world_size() > 2 or case.memory != LESS]
    asked = [
        (case, schedule)
        for case in cases
        for schedule in options.schedules.split(",")
        if schedule == "auto" or case.memory is None
    ]
    cuts = {(case.name, schedule): both(case, schedule, options) for case, schedule in asked}
    rounds = [
        {key: [promise.measured(each.step) for each in pair] for key, pair in cuts.items()}
        for _ in range(options.rounds + 1)  # the first one warms up
    ]
    for key, pair in cuts.items():
        predicted = [each.predicted for each in pair]
        seconds = [median(each[key][i] for each in rounds[1:]) for i in range(2)]
        gains = [1 - moved / equal for equal, moved in (predicted, seconds)]
        yield [*key, *predicted, gains[0], *seconds, gains[1], seconds[0] / predicted[0], seconds[1] / predicted[1]]


if __name__ == "__main__":
    main()
