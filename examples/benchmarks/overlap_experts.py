"""Measures how much of the exchanges between experts pairs hide: four pipeline ranks, two ranks of
experts.

    python examples/benchmarks/overlap_experts.py            # eight processes, on clocks that no load disturbs
    python examples/benchmarks/overlap_experts.py --sleep    # in real time, on a quiet machine

As overlap_tp.py, with `zbcompile.ExpertExchange` in place of tensor parallelism: each layer SLEEPS
in the place of its attention (`--attention` is the share of the layer's time), sends its tokens to
the experts of two ranks, SLEEPS there, and brings the results back. An exchange of tokens completes
no sooner than a fixed time after its start, that of counts immediately; `--exchanges` says what the two
of a forward take together, and so the two of a backward, as a share of the layer's weight gradient.
Tokens choose experts evenly, so no step is done again.

Processes, messages, collectives, compiled stages and the action loop are real. Without --sleep
nobody waits: each rank has a clock, which an operation moves on by its length, tokens and gradients
carry the moment at which they were made in their last column, and an exchange begins when the later
of its ranks has issued it.

Hidden is 1 - (time that ranks stand in waits for tokens) / (number of these exchanges x their
length), of those of the forward and of the backward, which the sign of what travels tells apart.
The last two columns are what the lowering foresees (`overlap_tp.py --simulate`) if a forward
computes before it sends tokens: everything in pairs, nothing of a forward alone, and of a backward
alone all but the exchange that it begins with.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from overlap import Until, alternating_medians, arguments, gated_mesh, on_processes, pipeline_step  # type: ignore[import-not-found]
from overlap_tp import SHARE, Gate, opened_order, simulated  # type: ignore[import-not-found]
from promise import BACKWARD, FORWARD, WEIGHT, WIDTH, pause  # type: ignore[import-not-found]
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import register_flop_formula

import zbcompile
from zbcompile.passes.cost.hardware import Connection, Hardware
from zbcompile.schedules import Schedule, build

ROWS, RANKS = 4, 2  # tokens of a microbatch; ranks along "ep", with one expert each
PER_RANK = 2  # layers of a pipeline rank
UNIT = 1e-6  # of the moments in tokens
# numbers that each operation reads: the order in a pair goes by the bytes that operations move
MANY = 1 << 18


class Clock:
    """The clock of this rank. With `moment=None` it is the clock of the machine."""

    moment: float | None = 0.0

    def work(self, seconds: float, given: Tensor, result: Tensor) -> Tensor:
        """`made` of `given` within some time."""
        if self.moment is None:
            pause(seconds)
        else:
            self.moment = max(self.moment, float(given[:, -1].max()) * UNIT) + seconds
            result[:, -1] = self.moment / UNIT
        return result

    def wait(self, until: float) -> float:
        """Stand until a moment; how long that took."""
        assert self.moment is not None
        before, self.moment = self.moment, max(self.moment, until)
        return self.moment - before


CLOCK = Clock()


@torch.library.custom_op("clocked::forward", mutates_args=())
def forward(x: Tensor, weight: Tensor, many: Tensor, part: float) -> Tensor:
    return CLOCK.work(part * FORWARD * SHARE, x, x * weight)


@torch.library.custom_op("clocked::input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, weight: Tensor, many: Tensor, part: float) -> Tensor:
    return CLOCK.work(part * BACKWARD * SHARE, gradient, gradient * weight)


@torch.library.custom_op("clocked::weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, x: Tensor, many: Tensor, part: float) -> Tensor:
    return CLOCK.work(part * WEIGHT * SHARE, gradient, gradient * x).sum(0)


def _save(ctx: object, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.part = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors)  # type: ignore[attr-defined]


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    (x, weight, many), part = ctx.saved_tensors, ctx.part  # type: ignore[attr-defined]
    return (
        input_gradient(gradient, weight, many, part),
        weight_gradient(gradient, x, many, part),
        None,
        None,
    )


forward.register_fake(lambda x, weight, many, part: torch.empty_like(x))
input_gradient.register_fake(lambda gradient, weight, many, part: torch.empty_like(gradient))
weight_gradient.register_fake(lambda gradient, x, many, part: gradient.new_empty(WIDTH))
forward.register_autograd(_backward, setup_context=_save)
for name, length in (
    ("forward", FORWARD),
    ("input_gradient", BACKWARD),
    ("weight_gradient", WEIGHT),
):
    register_flop_formula(
        getattr(torch.ops.clocked, name)
    )(  # at the nominal 50 GFLOP/s of the compiler's CPU
        lambda x, y, many, part, *rest, length=length, **options: int(part * length * SHARE * 5e10)
    )


class ClockedWork(dist.Work):
    """A collective that completes at a moment of this rank's clock."""

    def __init__(self, work: dist.Work, moment: float, waited: Callable[[float], object]) -> None:
        super().__init__()
        self.work, self.moment, self.waited = work, moment, waited

    def wait(self, timeout: Any = None) -> bool:
        self.work.wait()
        self.waited(CLOCK.wait(self.moment))
        return True


class TokenGate(Gate):  # type: ignore[misc]
    """A group whose exchanges of tokens take `seconds` from their start."""

    def alltoall_base(self, output: Tensor, given: Tensor, *args: Any) -> dist.Work:  # type: ignore[override]
        work = self.inner.alltoall_base(output, given, *args)
        if not given.is_floating_point():
            return work
        op = int(given[:, 0].sum() < 0)  # tokens are positive, gradients negative
        self.count[op] += 1
        if CLOCK.moment is None:
            return Until(work, time.monotonic() + self.seconds, partial(self._note, op))
        moments = [torch.zeros(1, dtype=torch.float64) for _ in range(RANKS)]
        self.inner.allgather([moments], [torch.tensor([CLOCK.moment], dtype=torch.float64)]).wait()
        return ClockedWork(
            work, float(torch.cat(moments).max()) + self.seconds, partial(self._note, op)
        )


class Layer(nn.Module):
    """`attention` is the share of its time that passes before it sends tokens to experts."""

    def __init__(self, attention: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.part = attention
        self.before, self.between = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("many", torch.zeros(MANY))
        self.exchange = zbcompile.ExpertExchange(RANKS, group, factor=1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.part:
            x = forward(x, self.before, self.many, self.part)
        rows, _, route = self.exchange.dispatch(x, torch.arange(ROWS) % RANKS)
        return self.exchange.combine(forward(rows, self.between, self.many, 1 - self.part), route)


class Model(nn.Module):
    """The input depends on parameters, as an embedding's output does."""

    def __init__(self, layers: int, attention: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.entry = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.layers = nn.Sequential(*(Layer(attention, group) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        measured: Tensor = self.layers(x * self.entry[0] + self.entry[1])
        return measured


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (target - y).mean()


def stepper(
    mesh: DeviceMesh,
    schedule: str | Schedule,
    microbatches: int,
    pairs: str,
    attention: float,
    seconds: float,
) -> Callable[[], object]:
    model = Model(PER_RANK * mesh["pp"].size(), attention, mesh["ep"].get_group())
    x = torch.ones(microbatches * ROWS, WIDTH)
    hardware = replace(
        Hardware.find("cpu-core"), within=Connection(0.0, ROWS * WIDTH * 4 / seconds)
    )
    options = {
        "schedule": schedule,
        "microbatches": microbatches,
        "hardware": hardware,
        "pairs": pairs,
    }
    step: Callable[[], object] = pipeline_step(model, mesh, x, loss_of, **options)
    return step


def length_and_hidden(step: Callable[[], object], gate: TokenGate) -> list[float]:
    """Milliseconds of a step, from the first start on any rank to the last end, and the percentages
    of its exchanges hidden: of the forward, and of the backward."""
    gate.read_counters()
    dist.barrier()
    if CLOCK.moment is not None:
        CLOCK.moment = 0.0
    begin = time.monotonic() if CLOCK.moment is None else 0.0
    step()
    span = torch.tensor(
        [-begin, time.monotonic() if CLOCK.moment is None else CLOCK.moment], dtype=torch.float64
    )
    dist.all_reduce(span, dist.ReduceOp.MAX)
    measured = torch.tensor(gate.read_counters(), dtype=torch.float64)
    dist.all_reduce(measured)
    step_time, waited = measured[:2] * gate.seconds, measured[2:]
    return [1e3 * float(span.sum()), *(100 * (1 - waited / step_time)).tolist()]


def row(
    mesh: DeviceMesh,
    gate: TokenGate,
    options: argparse.Namespace,
    name: str,
    attention: float,
    share: float,
) -> list[Any]:
    """The steps of a schedule: without pairs, with pairs, and without pairs with exchanges of no
    length."""
    seconds, count = share * WEIGHT * SHARE / 2, options.microbatches
    separate = stepper(
        mesh, opened_order(name, count, mesh["pp"].size()), count, "given", attention, seconds
    )
    kinds = [
        (separate, seconds),
        (stepper(mesh, name, count, "auto", attention, seconds), seconds),
        (separate, 0.0),
    ]
    alone, paired, free = alternating_medians(kinds, gate, options.steps, length_and_hidden)
    order = build(name, mesh["pp"].size(), count)
    # exchanges of a backward, which begins with one
    of_a_stage = 2 * PER_RANK * order.ranks / order.stages
    foreseen = simulated(name, order.ranks, count, share, 1 / of_a_stage)[-2:]
    return [
        name,
        attention,
        share,
        alone[0],
        paired[0],
        free[0],
        *alone[1:],
        *paired[1:],
        *foreseen,
    ]


def main(options: argparse.Namespace) -> None:
    CLOCK.moment = None if options.sleep else 0.0
    mesh, gate = gated_mesh(TokenGate, "ep", options.pipeline, RANKS)
    shares = (map(float, given.split(",")) for given in (options.attention, options.exchanges))
    cases = product(options.schedules.split(","), *shares)
    table = [row(mesh, gate, options, *case) for case in cases]
    if dist.get_rank() == 0:
        print(tabulate(table, HEAD, floatfmt=("", "g", "g", *[".0f"] * 9)), flush=True)


HEAD = ["schedule", "attention", "exchanges / W", "apart, ms", "pairs, ms", "0 ms exchanges"]
HEAD += [
    f"{op} hidden {how}, %" for how in ("apart", "in pairs", "in pairs, foreseen") for op in "FB"
]

if __name__ == "__main__":
    parser = arguments(__doc__, "dualpipe-v,1f1b-overlap")
    parser.add_argument(
        "--exchanges", default="0.5", help="times a layer's W (default: %(default)s)"
    )
    parser.add_argument(
        "--attention", default="0,0.5", help="share of a layer's time (default: %(default)s)"
    )
    parser.add_argument(
        "--pipeline", type=int, default=4, help="ranks of the pipeline (default: %(default)s)"
    )
    parser.add_argument("--sleep", action="store_true", help="sleep in place of moving clocks on")
    parser.add_argument(
        "--scale", type=float, default=4, help="of the times that promise.py sleeps (default: 4)"
    )
    given = parser.parse_args()
    on_processes(partial(main, given), RANKS * given.pipeline)
