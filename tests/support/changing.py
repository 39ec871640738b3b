"""Python state that changes between steps: a small model and losses, each with a change that eager
sees immediately and the notice that names it."""

import functools
import types
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
        self.middle, self.config, self.space = middle, Config(), types.SimpleNamespace(tau=1.0)
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


def weighted(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.mse_loss(output, target) * factor


@functools.wraps(F.mse_loss)
def wrapped(*args: Any) -> Tensor:
    return F.mse_loss(*args) * TAU


class Judge(nn.Module):
    """A loss with numbers and a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.factor, self.weights = Config(), 1.0, torch.ones(WIDTH)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * self.weights).mean() * self.factor * self.config.tau


def powered(output: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    return ((output - target).abs() ** power).mean()


def reading(net: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.mse_loss(y, t) * net.alpha + net.layers[0].weight.square().sum()


def case(middle: Any, change: Any, loss: Any = lambda net: F.mse_loss) -> tuple[Any, Any, Any]:
    return middle, change, loss


STEPS = {  # by what the notice says: what stands in the middle, a change, and the loss
    "model.drop.p: 0.1 -> 0.5": case(dropped, lambda n, _: vars(n.drop).update(p=0.5)),
    "model.recent: a deque -> ": case(
        lambda n, x: x * n.recent[0], lambda n, _: n.recent.appendleft(2.0)
    ),
    "changing.TAU: 1.0 -> 2.0": case(
        scaled, lambda *_: globals().update(TAU=2.0), lambda n: wrapped
    ),
    "model.active: 3 -> 2": case(lambda n, x: x.tanh(), lambda n, _: vars(n).update(active=2)),
    "model.alpha: 1.0 -> 2.0": case(scaled, lambda n, _: vars(n).update(alpha=2.0), reading),
    "model.numbers: [1.0, 2.0] -> [3.0, 2.0]": case(
        lambda n, x: x * n.numbers[0], lambda n, _: n.numbers.__setitem__(0, 3.0)
    ),
    "loss.config.tau: 1.0 -> 2.0": case(
        scaled, lambda _, loss: vars(loss.config).update(tau=2.0), lambda n: Judge()
    ),
    "model.space.tau: 1.0 -> 2.0": case(
        lambda n, x: x * n.space.tau, lambda n, _: vars(n.space).update(tau=2.0)
    ),
    "model.drop: a Dropout -> a Dropout": case(
        dropped, lambda n, _: setattr(n, "drop", nn.Dropout(0.5))
    ),
    "model.function: ": case(
        lambda n, x: n.function(x), lambda n, _: vars(n).update(function=torch.sigmoid)
    ),
    "model.shift: a Tensor -> ": case(
        lambda n, x: x + n.shift, lambda n, _: vars(n).update(shift=torch.zeros(WIDTH))
    ),
    "changing.TABLE: {'scale': 1.0} -> {'scale': 2.0}": case(
        lambda n, x: x * TABLE["scale"], lambda *_: TABLE.update(scale=2.0)
    ),
    "for other hooks of model.layers.0 ": case(
        scaled, lambda n, _: n.layers[0].register_forward_hook(lambda m, a, y: y * 2)
    ),
    "factor in the closure of weighted": case(
        scaled,
        lambda _, loss: setattr(loss.__closure__[0], "cell_contents", 0.5),
        lambda n: weighted(2.0),
    ),
    "loss.weights: a Tensor -> ": case(
        scaled, lambda _, loss: vars(loss).update(weights=torch.zeros(WIDTH)), lambda n: Judge()
    ),
    "loss.power: 2.0 -> 3.0": case(
        scaled,
        lambda _, loss: loss.keywords.update(power=3.0),
        lambda n: functools.partial(powered, power=2.0),
    ),
    "gradients of model.layers.0.weight: torch.float32 -> None and 1 more": case(
        scaled, lambda n, _: n.layers[0].requires_grad_(False)
    ),
    "model.drop.training: True -> False (program 2; max_shapes=8 are kept)": case(
        dropped, lambda n, _: n.drop.eval()
    ),
}
