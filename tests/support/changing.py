"""Python state that changes between steps: small models and losses, each with a change that eager
sees immediately."""

import argparse
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.oracle import Batch, eager_step

WIDTH, ROWS, MICROBATCHES = 4, 4, 2
TAU = 1.0
TABLE = {"scale": 1.0}
ARGUMENTS = argparse.Namespace(weight=1.0)


@dataclass
class Config:
    tau: float = 1.0


class Net(nn.Module):
    """Two layers, and `middle(net, x)` between them."""

    def __init__(self, middle: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.middle, self.config = middle, Config()
        self.alpha, self.active = 1.0, 3
        self.numbers, self.table, self.shift = [1.0, 2.0], {"a": 1.0}, torch.ones(WIDTH)
        self.recent = deque([1.0])
        self.space = types.SimpleNamespace(tau=1.0)
        self.function: Any = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.active]:
            x = self.middle(self, layer(x))
        return x


def scaled(net: Net, x: Tensor) -> Tensor:
    return x * TAU


def weighted(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * factor

    return loss


def wrapping(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args)

    return wrapper


@wrapping
def wrapped_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * TAU


def loss_by_arguments(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * ARGUMENTS.weight


class Judge:
    """A loss that keeps its weights as a dataclass."""

    def __init__(self) -> None:
        self.weights = Config()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.weights.tau


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.weights = 1.0, torch.ones(WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * self.weights).mean() * self.factor


def powered(output: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    return ((output - target).abs() ** power).mean()


Change = Callable[[Net, Any], object]


@dataclass(frozen=True)
class Case:
    """A model, its loss, and a change between two steps."""

    middle: Callable[[Net, Tensor], Tensor]
    change: Change
    loss: Callable[[], Any] = lambda: F.mse_loss


def store(owner: Any, name: str, value: Any) -> Change:
    """A change of something that does not belong to the model."""
    return lambda net, loss: (
        setattr(owner, name, value) if not isinstance(owner, dict) else owner.update({name: value})
    )


def of_model(path: str, value: Any) -> Change:
    """A change of an attribute of the model."""

    def change(net: Net, loss: Any) -> None:
        *holders, name = path.split(".")
        setattr(functools.reduce(getattr, holders, net), name, value)

    return change


def _cell(net: Net, loss: Any) -> None:
    loss.__closure__[0].cell_contents = 0.5


_module = globals()
STEPS = {  # what stands in the middle reads one thing; that is changed
    "another dropout": Case(lambda net, x: net.drop(x), of_model("drop", nn.Dropout(0.5))),
    "deque": Case(lambda net, x: x * net.recent[0], lambda net, _: net.recent.appendleft(2.0)),
    "wrapped loss's global": Case(scaled, store(_module, "TAU", 2.0), lambda: wrapped_loss),
    "loss's namespace": Case(scaled, store(ARGUMENTS, "weight", 2.0), lambda: loss_by_arguments),
    "loss's dataclass": Case(scaled, lambda _, loss: setattr(loss.weights, "tau", 2.0), Judge),
    "attribute": Case(lambda net, x: x * net.alpha, of_model("alpha", 2.0)),
    "list": Case(lambda net, x: x * net.numbers[0], lambda net, _: net.numbers.__setitem__(0, 3.0)),
    "mapping": Case(lambda net, x: x * net.table["a"], lambda net, _: net.table.update(a=2.0)),
    "config": Case(lambda net, x: x * net.config.tau, of_model("config.tau", 2.0)),
    "namespace": Case(lambda net, x: x * net.space.tau, of_model("space.tau", 2.0)),
    "number of layers": Case(lambda net, x: torch.tanh(x), of_model("active", 2)),
    "dropout": Case(lambda net, x: net.drop(x), of_model("drop.p", 0.5)),
    "function": Case(lambda net, x: net.function(x), of_model("function", torch.sigmoid)),
    "tensor": Case(lambda net, x: x + net.shift, of_model("shift", torch.zeros(WIDTH))),
    "global": Case(scaled, store(_module, "TAU", 2.0)),
    "global mapping": Case(lambda net, x: x * TABLE["scale"], store(TABLE, "scale", 2.0)),
    "loss's closure": Case(scaled, _cell, lambda: weighted(2.0)),
    "loss's attribute": Case(scaled, lambda _, loss: setattr(loss, "factor", 3.0), Weighted),
    "loss's tensor": Case(
        scaled, lambda _, loss: setattr(loss, "weights", torch.zeros(WIDTH)), Weighted
    ),
    "loss's keyword": Case(
        scaled,
        lambda _, loss: loss.keywords.update(power=3.0),
        lambda: functools.partial(powered, power=2.0),
    ),
    "frozen layer": Case(scaled, lambda net, _: net.layers[0].requires_grad_(False)),
    "mode": Case(lambda net, x: net.drop(x), lambda net, _: net.drop.eval()),
}


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def eager(net: Net, loss: Any, x: Tensor, step: int) -> Tensor:
    """The loss of a step; gradients are added to `.grad`."""
    return eager_step(net, loss, Batch((x,), {}, x), MICROBATCHES, step)


def saved() -> Iterator[None]:
    """Around a case: what it changes outside of its model is put back."""
    yield
    ARGUMENTS.weight = 1.0
    _module["TAU"] = TABLE["scale"] = 1.0
