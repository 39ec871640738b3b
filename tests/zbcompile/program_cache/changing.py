"""Python state that changes between steps: a small model and losses, each with a change that eager
sees immediately and the notice that names it."""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4
TAU = 1.0
TABLE = {"scale": 1.0}


@dataclass
class Config:
    tau: float = 1.0


class Net(nn.Module):
    """Three layers, and `middle(net, x)` behind each of them."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.middle, self.config = middle, Config()
        self.alpha, self.active, self.numbers, self.recent = 1.0, 3, [1.0, 2.0], deque([1.0])
        self.table: Any = {"a": 1.0}
        self.shift = torch.ones(WIDTH)
        self.function: Any = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.active]:
            x = self.middle(self, layer(x))
        return x


def scaled(net: Any, x: Tensor) -> Tensor:
    return x * TAU


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.drop(x)  # type: ignore[no-any-return]


def weighted(net: Any, factor: float = 2.0) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.mse_loss(output, target) * factor


@functools.wraps(F.mse_loss)
def wrapped(*args: Any) -> Tensor:
    return F.mse_loss(*args) * TAU


class Judge(nn.Module):
    """A loss with numbers and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.factor, self.weights = Config(), 1.0, torch.ones(WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * self.weights).mean() * self.factor * self.config.tau


def powered(output: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    return ((output - target).abs() ** power).mean()


def reading(net: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) * net.alpha + net.layers[0].weight.square().sum()


Middle, Loss = Callable[[Any, Tensor], Tensor], Callable[[Any], Any]
MSE: Loss = lambda net: F.mse_loss  # noqa: E731
JUDGE: Loss = lambda net: Judge()  # noqa: E731
POWERED: Loss = lambda net: functools.partial(powered, power=2.0)  # noqa: E731
# by what the notice says: what stands in the middle, a statement that changes something, the loss
STEPS: dict[str, tuple[Middle, str, Loss]] = {
    "model.drop.p: 0.1 -> 0.5": (dropped, "net.drop.p = 0.5", MSE),
    "model.recent: a deque -> ": (lambda n, x: x * n.recent[0], "net.recent.appendleft(2.0)", MSE),
    "changing.TAU: 1.0 -> 2.0": (scaled, "changing.TAU = 2.0", lambda net: wrapped),
    "model.active: 3 -> 2": (lambda n, x: x.tanh(), "net.active = 2", MSE),
    "model.alpha: 1.0 -> 2.0": (scaled, "net.alpha = 2.0", reading),
    "loss.config.tau: 1.0 -> 2.0": (scaled, "loss.config.tau = 2.0", JUDGE),
    "[1.0, 2.0] -> [3.0, 2.0]": (lambda n, x: x * n.numbers[0], "net.numbers[0] = 3.0", MSE),
    "model.drop: a Dropout -> a Dropout": (dropped, "net.drop = nn.Dropout(0.5)", MSE),
    "model.shift: a Tensor -> ": (lambda n, x: x + n.shift, "net.shift = net.shift * 2", MSE),
    "closure of weighted": (scaled, "loss.__closure__[0].cell_contents = 0.5", weighted),
    "changing.TABLE: {'scale': 1.0} -> {'scale': 2.0}": (
        *(lambda n, x: x * TABLE["scale"], 'changing.TABLE["scale"] = 2.0', MSE),
    ),
    "for other hooks of model.layers.0 ": (
        *(scaled, "net.layers[0].register_forward_hook(lambda m, a, y: y * 2)", MSE),
    ),
    "loss.weights: a Tensor -> ": (scaled, "loss.weights = loss.weights * 2", JUDGE),
    "loss.power: 2.0 -> 3.0": (scaled, "loss.keywords.update(power=3.0)", POWERED),
    "gradients of model.layers.0.weight: torch.float32 -> None and 1 more": (
        *(scaled, "net.layers[0].requires_grad_(False)", MSE),
    ),
    "training: True -> False (program 2; max_shapes=8 are": (dropped, "net.drop.eval()", MSE),
}
