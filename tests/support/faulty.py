"""A model that breaks on order: in a pass of a layer, on a rank, by an exception, a signal or a
long sleep."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from zbcompile.engine.rank import HANDLERS, Instruction, RankRun

WIDTH = 8
LAYERS = 4
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


@act.register_fake
def _(x: Tensor, pass_: str) -> Tensor:
    return torch.empty_like(x)


def _setup(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, str], output: Tensor
) -> None:
    ctx.backward_pass = {"F": "B", "": "W"}.get(inputs[1], "")  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
    return act(gradient, ctx.backward_pass), None  # type: ignore[attr-defined]


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
    """How a call ended on a rank: the error, how many gradients were left, whether the parameters
    kept their bits."""

    error: str
    message: str
    seconds: float
    gradients: int = 0
    untouched: bool = True


def attempt(pipe: zbcompile.Pipeline, call: Callable[[], object]) -> Ended | None:
    """Returns what `call` ends with, and what it leaves behind."""
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    started = time.monotonic()
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        seconds = time.monotonic() - started
        left = sum(parameter.grad is not None for parameter in pipe.parameters())
        same = all(map(torch.equal, before, pipe.parameters()))
        return Ended(type(error).__name__, str(error), seconds, left, same)
    finally:
        INJECT.order = Order()
        pipe.close()
    return None


def trained(schedule: str = "1f1b", timeout: float = 60) -> zbcompile.Pipeline:
    """A pipeline after one good step, which from then on waits `timeout` seconds (compiling may
    take longer)."""
    pipe = make(schedule)
    pipe.step(rows(), target=rows())
    _drop_gradients(pipe)
    pipe._watch.timeout = timeout  # type: ignore[union-attr]
    return pipe


def _drop_gradients(pipe: zbcompile.Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def failing_step(order: Order, timeout: float = 60, schedule: str = "1f1b") -> Ended | None:
    """`order` is carried out in the second step."""
    pipe = trained(schedule, timeout)
    INJECT.order, INJECT.calls = order, 0
    return attempt(pipe, lambda: pipe.step(rows(), target=rows()))


def failing_beside_a_stall(order: Order) -> Ended | None:
    """Like `failing_step`; a rank that looks for the reason pauses 2.6 seconds between looks, as on a
    busy machine."""
    pause = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(2.6))
    with patch("zbcompile.faults.watch.time", pause):
        return failing_step(order)


def failing_shard(order: Order) -> Ended | None:
    """`order` is carried out in S or T of the second step, on a rank's shard of the output
    layer."""
    targets = torch.arange(8)
    model = Faulty(nn.Linear(WIDTH, WORDS, bias=False))
    pipe = make("zb-h1", model=model, loss=F.cross_entropy, vocab=1)
    pipe.step(rows(), target=targets)
    _drop_gradients(pipe)
    INJECT.order, INJECT.calls = order, 0
    with patch.dict(HANDLERS, dict.fromkeys("ST", _injected)):
        return attempt(pipe, lambda: pipe.step(rows(), target=targets))


def _injected(run: RankRun, to: Instruction) -> None:
    INJECT(to.action.op)
    run._shard(to)


def never_comes(rank: int, timeout: float) -> Ended | None:
    """A rank makes no pipeline at all."""
    if dist.get_rank() == rank:
        return None
    return _uncompiled(make(timeout=timeout), rows())


def bad_first_batch(rank: int) -> Ended | None:
    """A rank's first batch cannot be split."""
    return _uncompiled(make(), rows(6 if dist.get_rank() == rank else 8))


def _uncompiled(pipe: zbcompile.Pipeline, x: Tensor) -> Ended | None:
    started = time.monotonic()
    try:
        pipe.step(x, target=x)
    except zbcompile.PipelineError as error:
        return Ended(type(error).__name__, str(error), time.monotonic() - started)
    finally:
        pipe.close()
    return None


def bad_batch(rank: int) -> Ended | None:
    """A rank's second batch cannot be split: its target has other rows."""
    pipe = trained()
    return attempt(
        pipe, lambda: pipe.step(rows(8), target=rows(6 if dist.get_rank() == rank else 8))
    )


def other_count(rank: int) -> Ended | None:
    """A rank's second batch runs in fewer microbatches."""
    pipe = trained(timeout=3)
    x = rows(6 if dist.get_rank() == rank else 8)
    return attempt(pipe, lambda: pipe.step(x, target=x))


def other_shape(rank: int) -> Ended | None:
    """A rank's second batch has another size."""
    pipe = trained(timeout=3)
    x = rows(4 if dist.get_rank() == rank else 8)
    return attempt(pipe, lambda: pipe.step(x, target=x))


def other_known_step(
    rank: int, usual: dict[str, object], other: dict[str, object], samples: int = 8
) -> Ended | None:
    """A rank takes another step than the others, and all have compiled both."""
    pipe = make()
    pipe.step(rows(samples), target=rows(samples), **usual)
    pipe.step(rows(), target=rows(), **other)
    _drop_gradients(pipe)
    pipe._watch.timeout = 3  # type: ignore[union-attr]
    x, keywords = (rows(), other) if dist.get_rank() == rank else (rows(samples), usual)
    return attempt(pipe, lambda: pipe.step(x, target=x, **keywords))


def other_call(rank: int) -> Ended | None:
    """A rank evaluates while the others train."""
    pipe = trained(timeout=3)
    if dist.get_rank() == rank:
        return attempt(pipe, lambda: pipe.eval(rows()))
    return attempt(pipe, lambda: pipe.step(rows(), target=rows()))


def one_call_ahead(rank: int) -> Ended | None:
    """A rank fails in a call that the others have left."""
    pipe = trained()
    if dist.get_rank() == rank:
        INJECT.order, INJECT.calls = Order("raise", rank, "F", 0), 0
    else:
        with pipe._watch.region("another call"):
            pass
    return attempt(pipe, lambda: pipe.step(rows(), target=rows()))


def other_program(rank: int, what: str) -> Ended | None:
    """A rank compiles something else, or with another torch or switch."""
    options, version, x, switches = {}, torch.__version__, rows(), {}
    if dist.get_rank() == rank:
        options = OTHER.get(what, dict)()
        x = x.double() if what == "dtype" else x
        torch.__version__ = "2.12.1" if what == "torch" else version  # type: ignore[assignment]
        switches = {what: "1"} if what.isupper() else {}
    try:
        with patch.dict(os.environ, switches):
            return _uncompiled(make(**options), x)  # type: ignore[arg-type]
    finally:
        torch.__version__ = version


OTHER: dict[str, Callable[[], dict[str, object]]] = {
    "microbatches": lambda: {"microbatches": 2},
    "schedule": lambda: {"schedule": "gpipe"},
    "model": lambda: {"model": Faulty(torch.sin)},
    "dtype": lambda: {"model": Faulty().double()},
    "timeout": lambda: {"timeout": 90.0},
}


def peer_of_a_device(rank: int, timeout: float, what: str = "") -> Ended | None:
    """A rank does not come to a call that another one has given to its device, and goes on from; or
    what it is ordered to do instead."""
    pipe = trained(timeout=timeout)
    watch: Any = pipe._watch
    if dist.get_rank() == rank:
        ACTS.get(what, int)()
        region = watch.position.region + 1
        _wait_until(lambda: watch.store.get_fault(region) is not None)
    else:
        # The fault may be known before the region ends; the call below must then say the same.
        with contextlib.suppress(zbcompile.FaultError), watch.region("step 1"):
            if watch.backend == "nccl":  # the stream stands still until the message comes
                pipe._ranks.links.inward[rank].recv([rows(1)], 0, 0).wait()  # type: ignore[attr-defined]
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
    rank: int
    run: Callable[..., Ended | None]
    args: tuple[object, ...]
    says: str
    within: float = 10.0
    silent: bool = False  # the rank itself says nothing: it is dead, or not there
    ranks: int = 2


def _raises(rank: int, pass_: str, call: int, where: str) -> Scenario:
    order = Order("raise", rank, pass_, call)
    return Scenario(
        f"an exception in {pass_}", rank, failing_step, (order, 60.0, "zb-h1"), _broken(rank, where)
    )


def _raises_in_pair(rank: int, pass_: str, call: int, where: str) -> Scenario:
    order, half = Order("raise", rank, pass_, call), "forward" if pass_ == "F" else "backward"
    name = f"an exception in the {half} of a pair"
    return Scenario(name, rank, failing_step, (order, 60.0, "dualpipe-v"), _broken(rank, where))


def _raises_in_shard(rank: int, pass_: str, call: int) -> Scenario:
    order = Order("raise", rank, pass_, call)
    return Scenario(f"an exception in {pass_}", rank, failing_shard, (order,), _broken(rank, pass_))


def _dies(run: Callable[[Order], Ended | None], rank: int, pass_: str, call: int) -> Scenario:
    message = f"rank {rank} failed at .*step 1: its process ended"
    return Scenario(
        f"SIGKILL in {pass_}", rank, run, (Order("kill", rank, pass_, call),), message, silent=True
    )


def _broken(rank: int, where: str) -> str:
    return f"rank {rank} failed at {where}.* of step 1: ValueError: broken on order"


DIFFERENT = "the ranks compiled different programs: "
SCENARIOS = (
    _raises(0, "F", 5, "F0"),
    _raises(1, "F", 0, "F1"),
    _raises(0, "B", 3, "B0"),
    _raises(1, "W", 2, "W1"),
    _raises_in_pair(0, "F", 6, "F3.2"),
    _raises_in_pair(1, "B", 2, "BW2.1"),
    _raises_in_shard(1, "S", 2),
    _raises_in_shard(0, "T", 1),
    _dies(failing_shard, 1, "S", 1),
    Scenario(
        "Ctrl-C in F",
        0,
        failing_step,
        (Order("interrupt", 0, "F", 3),),
        "^$|rank 0 failed at F0.*KeyboardInterrupt",
    ),
    _dies(failing_step, 1, "B", 3),
    replace(_dies(failing_beside_a_stall, 1, "B", 3), name="SIGKILL in B on a busy machine"),
    Scenario(
        "endless F, timeout=2",
        0,
        failing_step,
        (Order("sleep", 0, "F", 5), 2.0),
        r"rank 0 failed at F0.* of step 1: it did not finish; rank 1 waited 2 s for it at F1.* of"
        r" step 1",
    ),
    Scenario(
        "a rank that never comes, timeout=2",
        1,
        never_comes,
        (1, 2.0),
        "rank 1 failed at its first call: it never arrived; rank 0 waited 2 s for it at the"
        " comparison of compiling",
        silent=True,
    ),
    Scenario(
        "a first batch that cannot be split",
        1,
        bad_first_batch,
        (1,),
        "a batch of 6 samples cannot be split into 4 equal microbatches",
    ),
    Scenario(
        "a later batch that cannot be split", 1, bad_batch, (1,), "target has 6 rows, the batch 8"
    ),
    Scenario(
        "a later batch of fewer microbatches",
        1,
        other_count,
        (1,),
        r"rank 1 failed at .* of step 1 in 3 microbatches: rank 0 is at .* of step 1 meanwhile",
    ),
    Scenario(
        "a later batch of another size",
        1,
        other_shape,
        (1,),
        r"rank 1 failed at the comparison of compiling microbatches of .* rank 0 is at"
        r" (F0|BW0).* of step 1",
    ),
    Scenario(
        "a later batch of another size that was compiled before",
        1,
        other_known_step,
        (1, {}, {}, 16),
        r"rank 1 failed at .* of step 2 of program 2 for args\[0\]\[2, 8\].* rank 0 is at .* of"
        r" step 2 meanwhile",
    ),
    Scenario(
        "another return_outputs= that was compiled before",
        1,
        other_known_step,
        (1, {}, {"return_outputs": True}),
        "rank 1 failed at .* of step 2 of program 2 for .* with return_outputs=True: rank 0 is at"
        " .* of step 2 meanwh",
    ),
    Scenario(
        "outputs for the last rank alone",
        1,
        other_known_step,
        (1, {"return_outputs": True}, {"return_outputs": "last"}),
        "rank 1 failed at .* of step 2 with return_outputs='last': rank 0 is at .* of step 2 with"
        " return_outputs=True",
    ),
    Scenario(
        "an exception in a call that others have left", 1, one_call_ahead, (1,), _broken(1, "F1")
    ),
    Scenario(
        "eval instead of step",
        1,
        other_call,
        (1,),
        "eval.* is at .* meanwhile. Every rank must make the same",
    ),
    Scenario(
        "another count of microbatches",
        1,
        other_program,
        (1, "microbatches"),
        r"args\[0\] of this batch differs .* \(4 microbatches of float32.*, and 2 microbatches of"
        r" float32",
    ),
    Scenario(
        "another model",
        1,
        other_program,
        (1, "model"),
        DIFFERENT + r"graphs\[\d\] is \w+ on rank 0",
    ),
    Scenario(
        "another dtype",
        1,
        other_program,
        (1, "dtype"),
        r"args\[0\] of this batch differs .* \(4 microbatches of float32.*, and 4 microbatches of"
        r" float64",
    ),
    Scenario(
        "a rank that a device waits for, timeout=2",
        1,
        peer_of_a_device,
        (1, 2.0),
        "rank 1 failed at the end of step 0: it went no further; rank 0 waited 2 s for it at the"
        " end of step 1",
    ),
    Scenario(
        "a rank that a device waits for is killed",
        1,
        peer_of_a_device,
        (1, 2.0, "kill"),
        "rank 1 failed at .*: (its process ended|it went no further)",
        silent=True,
    ),
    Scenario(
        "another schedule",
        1,
        other_program,
        (1, "schedule"),
        DIFFERENT + "schedule is 1f1b on rank 0 and gpipe",
    ),
    Scenario(
        "another timeout=",
        1,
        other_program,
        (1, "timeout"),
        DIFFERENT + "timeout is 60 on rank 0 and 90",
    ),
    Scenario(
        "another ZBCOMPILE_ORDERED",
        1,
        other_program,
        (1, "ZBCOMPILE_ORDERED"),
        DIFFERENT + "ZBCOMPILE_ORDERED is False on rank 0 and True on rank 1",
    ),
    Scenario(
        "another torch",
        1,
        other_program,
        (1, "torch"),
        DIFFERENT + "torch is .* on rank 0 and 2.12.1 on rank 1",
    ),
)
