"""Under autocast the gradients of a parameter's uses are added as in eager mode."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import step_as_eager

WIDTH = 8


def half(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


class Loop(nn.Module):
    """Three layers, and a forward of them."""

    def __init__(self, function: Callable[["Loop", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.function = nn.Parameter(torch.ones(WIDTH)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def loop(model: Loop, x: Tensor, regions: str = "one") -> Tensor:
    """A layer that is applied three times in an autocast region, or in one region each."""
    with half(regions == "one"):
        x = model.first(x)
        for _ in range(3):
            with half(regions == "several"):
                x = x + model.scale * torch.tanh(model.layer(x))
        return model.last(x)


def several(model: Loop, x: Tensor) -> Tensor:
    return loop(model, x, "several")


def inside_and_outside(model: Loop, x: Tensor) -> Tensor:
    x = model.layer(loop(model, model.layer(x)).float())
    with half():
        return model.layer(model.layer(x)) + model.layer(x)


def casts_of_the_model(model: Loop, x: Tensor) -> Tensor:
    """Such casts are not merged."""
    with half():
        x = x @ model.layer.weight.to(torch.bfloat16) + x @ model.layer.weight.bfloat16()
        return model.last(model.first(x) + F.linear(x, model.layer.weight))


def loss_in_half(output: Tensor, target: Tensor) -> Tensor:
    with half():
        return F.mse_loss(output.float(), target)


@pytest.mark.parametrize("forward", [loop, several, inside_and_outside, casts_of_the_model])
def test_gradients_of_uses(forward: Callable[[Loop, Tensor], Tensor]) -> None:
    x, target = torch.randn(2, 16, WIDTH).unbind()
    step_as_eager(Loop(forward), x, target, loss_in_half, schedule="zb-v")
