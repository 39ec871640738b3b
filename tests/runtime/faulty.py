"""A model that breaks on order: in a pass of a layer, on a rank, by an exception, a signal or a long sleep."""

import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

WIDTH = 8
LAYERS = 8


@dataclass(frozen=True)
class Order:
    """`what` ("raise", "kill", "stop" or "sleep") shall happen at call number `call` of a pass on a rank."""

    what: str = ""
    rank: int = 0
    pass_: str = "F"
    call: int = 0


@dataclass
class Injector:
    """Counts the calls of the passes on this rank. It is off while the model is captured and compiled."""

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
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(60),
}
INJECT = Injector()


@torch.library.custom_op("faulty::act", mutates_args=())
def act(x: Tensor, pass_: str) -> Tensor:
    INJECT(pass_)
    return x.clone()


@act.register_fake
def _(x: Tensor, pass_: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.backward_pass = {"F": "B", "": "W"}.get(inputs[1], "")  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
    return act(gradient, ctx.backward_pass), None  # type: ignore[attr-defined]


act.register_autograd(_backward, setup_context=_setup)


class Faulty(nn.Module):
    """Linear layers that pass the injector in F, B and W. One parameter is tied over the first and last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = act(torch.tanh(F.linear(x, act(layer.weight, ""), layer.bias)), "F")
        return x


def make(schedule: str = "zb-h1", timeout: float = 60, **options: object) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    options = {"microbatches": 4, "loss": F.mse_loss} | options
    return zbcompile.pipeline(Faulty(), schedule=schedule, timeout=timeout, **options)


def rows(samples: int = 8) -> Tensor:
    return torch.linspace(-1, 1, samples * WIDTH).view(samples, WIDTH)


@dataclass(frozen=True)
class Ended:
    """How a step ended on a rank: the error, how many gradients were left, whether the parameters kept their bits."""

    error: str
    message: str
    seconds: float
    gradients: int
    untouched: bool


def failing_step(order: Order, schedule: str = "zb-h1", timeout: float = 60) -> Ended | None:
    """A good step, then one in which `order` is carried out."""
    pipe = make(schedule, timeout)
    pipe.step(rows(), target=rows())
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    INJECT.order, INJECT.calls = order, 0
    started = time.monotonic()
    try:
        pipe.step(rows(), target=rows())
    except Exception as error:
        seconds = time.monotonic() - started
        left = sum(parameter.grad is not None for parameter in pipe.parameters())
        same = all(map(torch.equal, before, pipe.parameters()))
        return Ended(type(error).__name__, str(error), seconds, left, same)
    finally:
        INJECT.order = Order()
        pipe.close()
    return None
