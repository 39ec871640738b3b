"""Under autocast the gradients of a parameter's uses are added as in eager mode."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import step_as_eager

WIDTH = 8


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Loop(nn.Module):
    """A layer that is applied five times in an autocast region, or in one region each."""

    def __init__(self, regions: str = "one") -> None:
        super().__init__()
        self.regions = regions
        self.first, self.layer, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        around = half() if self.regions == "one" else contextlib.nullcontext()
        with around:
            x = self.first(x)
            for _ in range(5):
                with half() if self.regions == "several" else contextlib.nullcontext():
                    x = x + self.scale * torch.tanh(self.layer(x))
            return self.last(x)


def check(schedule: str, model: nn.Module, loss: Any) -> None:
    x, target = torch.randn(2, 16, WIDTH).unbind()
    step_as_eager(model, x, target, loss, schedule=schedule)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


@pytest.mark.parametrize(("regions", "schedule"), [("one", "zb-v"), ("several", "zb-h1")])
def test_a_layer_used_five_times(regions: str, schedule: str) -> None:
    torch.manual_seed(0)
    check(schedule, Loop(regions), loss_fn)


def test_uses_inside_and_outside_of_a_region() -> None:
    class Model(Loop):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(super().forward(self.layer(x)).float())
            with half():
                return self.layer(self.layer(x)) + self.layer(x)

    torch.manual_seed(0)
    check("zb-h1", Model(), loss_fn)


def test_casts_of_the_model_are_not_merged() -> None:
    class Model(Loop):
        def forward(self, x: Tensor) -> Tensor:
            with half():
                x = x @ self.layer.weight.to(torch.bfloat16) + x @ self.layer.weight.bfloat16()
                return self.last(self.first(x) + F.linear(x, self.layer.weight))

    torch.manual_seed(0)
    check("zb-h1", Model(), loss_fn)


def test_a_region_around_the_step() -> None:
    """The backward runs outside of the region, as torch recommends."""
    torch.manual_seed(0)
    model = Loop("none")

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with half():
                return self.model(x)

    def in_half(output: Tensor, target: Tensor) -> Tensor:
        with half():
            return loss_fn(output, target)

    check("zb-v", Inside(), in_half)
