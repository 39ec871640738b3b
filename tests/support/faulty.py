"""A model that breaks on order: in a pass of a layer, on a rank, by an exception, a signal or a
long sleep."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.training import compiled_once
from zbcompile.engine.rank import HANDLERS, Instruction, RankRun
from zbcompile.faults.watch import INTERVAL

WIDTH, LAYERS = 8, 4
WORDS = 32  # of the output layer that is sharded


@dataclass(frozen=True)
class Order:
    """`what` ("raise", "interrupt", "kill" or "sleep") shall happen at call number `call` of a pass
    on a rank."""

    what: str = ""
    rank: int = 0
    pass_: str = "F"
    call: int = 0


@dataclass
class Injector:
    """Counts the calls of the passes on this rank. It is off while the model is captured and
    compiled."""

    order: Order = Order()
    calls: int = 0

    def __call__(self, pass_: str) -> None:
        order = self.order
        if order.what and order.pass_ == pass_ and order.rank == dist.get_rank():
            self.calls += 1
            if self.calls == order.call + 1:
                ACTS[order.what]()


def _raise() -> None:
    raise ValueError("broken on order")


ACTS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "sleep": lambda: time.sleep(6),
}
INJECT = Injector()


@torch.library.custom_op("faulty::act", mutates_args=())
def act(x: Tensor, pass_: str) -> Tensor:
    INJECT(pass_)
    return x.clone()


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.backward_pass = {"F": "B", "": "W"}.get(inputs[1], "")


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return act(gradient, ctx.backward_pass), None


act.register_fake(lambda x, pass_: torch.empty_like(x))
act.register_autograd(_backward, setup_context=_setup)


class Faulty(nn.Module):
    """Linear layers that pass the injector in F, B and W. One parameter is tied over the first and
    last stage."""

    def __init__(self, final: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[0].weight
        self.final = final

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = act(torch.tanh(F.linear(x, act(layer.weight, ""), layer.bias)), "F")
        return self.final(x)


def make(
    schedule: str = "1f1b", timeout: float = 60, model: nn.Module | None = None, **options: object
) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    options = {"microbatches": 4, "loss": F.mse_loss} | options
    return zbcompile.pipeline(model or Faulty(), schedule=schedule, timeout=timeout, **options)


def rows(samples: int = 8) -> Tensor:
    return torch.linspace(-1, 1, samples * WIDTH).view(samples, WIDTH)


@dataclass(frozen=True)
class Ended:
    """How a call ended on a rank: the error, and whether gradients were left or parameters lost
    their bits."""

    message: str
    seconds: float
    untouched: bool = True


def attempt(pipe: zbcompile.Pipeline, call: Callable[[], object]) -> Ended | None:
    """Returns what `call` ends with, and what it leaves behind."""
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    started = time.monotonic()
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        seconds = time.monotonic() - started
        same = all(map(torch.equal, before, pipe.parameters()))
        left = any(parameter.grad is not None for parameter in pipe.parameters())
        return Ended(str(error), seconds, same and not left)
    finally:
        INJECT.order = Order()
        pipe.close()
    return None


def compile_before() -> None:
    """For processes that are forked later, what `trained` compiles."""
    with compiled_once("faulty", exact=False):
        make(ranks=2).compile(rows(), target=rows())


def trained(
    pipe: zbcompile.Pipeline, timeout: float = 60, target: Tensor | None = None
) -> zbcompile.Pipeline:
    """The pipeline after one good step, which from then on waits `timeout` seconds (compiling may
    take longer)."""
    with compiled_once("faulty", exact=False) if target is None else contextlib.nullcontext():
        pipe.step(rows(), target=rows() if target is None else target)
    pipe.zero_grad()
    pipe._watch.timeout = timeout  # type: ignore[union-attr]
    return pipe


def failing_step(order: Order, timeout: float = 60, schedule: str = "1f1b") -> Ended | None:
    """`order` is carried out in the second step."""
    pipe = trained(make(schedule), timeout)
    INJECT.order, INJECT.calls = order, 0
    return attempt(pipe, lambda: pipe.step(rows(), target=rows()))


def sharding(timeout: float = 60) -> zbcompile.Pipeline:
    model = Faulty(nn.Linear(WIDTH, WORDS, bias=False))
    return make("zb-h1", timeout, model, loss=F.cross_entropy, vocab=1)


def failing_shard(order: Order) -> Ended | None:
    """`order` is carried out in S or T of the second step, on a rank's shard of the output
    layer."""

    def injected(run: RankRun, to: Instruction) -> None:
        INJECT(to.action.op)
        run._compute(to)

    pipe = trained(sharding(), target=torch.arange(8))
    INJECT.order, INJECT.calls = order, 0
    with patch.dict(HANDLERS, dict.fromkeys("ST", injected)):
        return attempt(pipe, lambda: pipe.step(rows(), target=torch.arange(8)))


def freezes_in_a_wait(timeout: float) -> Ended | None:
    """The last rank is stopped while it waits for the first one, which comes later."""
    processes = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    pipe, rank = trained(make(), timeout), dist.get_rank()
    if rank == 1:
        threading.Timer(1.0, os.kill, (processes[rank], signal.SIGSTOP)).start()
    else:
        time.sleep(2.0)
    ended = attempt(pipe, lambda: pipe.step(rows(), target=rows()))
    os.kill(processes[1], signal.SIGKILL)
    return ended


Call = tuple[str, int, dict[str, object]]  # a method, the samples of its batch, its keywords


def apart(usual: Call, other: Call, known: bool) -> Ended | None:
    """The last rank makes another call than the others; `known`: all have compiled both."""
    pipe = make()

    def made(call: Call) -> object:
        name, samples, keywords = call
        target = {"target": rows(samples)} if name == "step" else {}
        return getattr(pipe, name)(rows(samples), **target, **keywords)

    for call in (usual, other) if known else (usual,):
        made(call)
    pipe.zero_grad()
    pipe._watch.timeout = 3  # type: ignore[union-attr]
    return attempt(pipe, lambda: made(other if dist.get_rank() == 1 else usual))


def peer_of_a_device(timeout: float, what: str = "") -> Ended | None:
    """The last rank does not come to a call that another one has given to its device, and goes on
    from; or what it is ordered to do instead."""
    pipe = trained(make(), timeout)
    watch: Any = pipe._watch
    if dist.get_rank() == 1:
        time.sleep(2 * INTERVAL)  # the others know by then where it is
        ACTS.get(what, int)()
        region = watch.position.region + 1
        _wait_until(lambda: watch.store.get_fault(region) is not None)
    else:
        # The fault may be known before the region ends; the call below must then say the same.
        with contextlib.suppress(zbcompile.FaultError), watch.region("step 1"):
            if watch.backend == "nccl":  # the stream stands still until the message comes
                pipe._ranks.links.inward[1].recv([rows(1)], 0, 0).wait()  # type: ignore[attr-defined]
            else:
                watch._device_waits = lambda: True
        _wait_until(lambda: watch.fault is not None)
    return attempt(pipe, lambda: pipe.step(rows(), target=rows()))


def _wait_until(there: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.05)


@dataclass(frozen=True)
class Scenario:
    """Something that breaks, on which rank, and what every rank that lives then says."""

    name: str
    says: str
    rank: int
    run: Callable[..., Ended | None]
    args: tuple[object, ...]
    silent: bool = False  # the rank itself says nothing: it is dead, or not there
    within: float = 5.0  # beyond a timeout


def _raises(rank: int, pass_: str, call: int, where: str, schedule: str = "zb-h1") -> Scenario:
    order = Order("raise", rank, pass_, call)
    says = f"rank {rank} failed at {where}.* of step 1: ValueError: broken on order"
    if pass_ in "ST":
        return Scenario(f"an exception in {pass_}", says, rank, failing_shard, (order,))
    name = f"an exception in {pass_}{' of a pair' * (schedule == 'dualpipe-v')}"
    return Scenario(name, says, rank, failing_step, (order, 60, schedule))


def _kill(pass_: str, call: int, run: Any) -> Scenario:
    says, order = "rank 1 failed at .*step 1: its process ended", Order("kill", 1, pass_, call)
    return Scenario(f"SIGKILL in {pass_}", says, 1, run, (order,), silent=True)


def _apart(name: str, says: str, usual: Call, other: Call, known: bool = False) -> Scenario:
    return Scenario(name, says, 1, apart, (usual, other, known), within=8.0)


STEP: Call = ("step", 8, {})
ALL, LAST = (("step", 8, {"return_outputs": where}) for where in (True, "last"))
AT, STEP_2 = "rank 0 waited 2 s for it at", r"rank 1 failed at .* of step 2"
# more: `examples/benchmarks/fault_sweep.py`
SCENARIOS = (
    _raises(1, "W", 2, "W1"),
    _kill("B", 3, failing_step),
    _apart(
        "outputs for the last rank alone",
        f"{STEP_2} with return_outputs='last': rank 0 is at .* of step 2 with return_outputs=True",
        *(ALL, LAST, True),
    ),
    _raises(0, "F", 6, "F3.2", "dualpipe-v"),
    _raises(1, "B", 2, "BW2.1", "dualpipe-v"),
    _raises(1, "S", 2, "S"),
    _raises(0, "T", 1, "T"),
    _kill("S", 1, failing_shard),
    Scenario(
        *("Ctrl-C in F", "rank 0 failed at F0.*KeyboardInterrupt|^$", 0, failing_step),
        (Order("interrupt", 0, "F", 3),),
    ),
    Scenario(
        *(
            "a rank that freezes while it waits",
            "rank 1 failed at .*its process ended or is frozen",
        ),
        *(1, freezes_in_a_wait, (3.0,), True, 8.0),
    ),
    _apart(
        "fewer microbatches",
        "of step 1 in 3 microbatches: rank 0 is at .* of step 1 meanwhile",
        *(STEP, ("step", 6, {})),
    ),
    _apart(
        "a batch of another size",
        "comparison of compiling microbatches of .* rank 0 is at (F0|BW0)",
        *(STEP, ("step", 4, {})),
    ),
    _apart(
        "a batch of another size that was compiled before",
        rf"{STEP_2} of program 2 for args\[0\]\[2, 8\].* rank 0 is at .* of step 2 meanwhile",
        *(("step", 16, {}), STEP, True),
    ),
    _apart("eval instead of step", "eval.* is at .* meanwhile. Every rank", STEP, ("eval", 8, {})),
    Scenario(
        "a rank that a device waits for",
        f"rank 1 failed at the end of step 0: it went no further; {AT} the end of step 1",
        *(1, peer_of_a_device, (2.0,)),
    ),
    Scenario(
        "a rank that a device waits for is killed",
        "rank 1 failed at .*: (its process ended|it went no further)",
        *(1, peer_of_a_device, (2.0, "kill"), True),
    ),
)
