"""Under autocast the gradients of a parameter's uses are added as in eager mode."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.test_bits import batches_of, check, rows

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


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


@pytest.mark.parametrize(("regions", "schedule"), [("one", "zb-v"), ("several", "zb-h1")])
def test_a_layer_used_five_times(regions: str, schedule: str) -> None:
    torch.manual_seed(0)
    check(schedule, 2, Loop(regions), batches_of(rows), loss_fn)


def test_uses_inside_and_outside_of_a_region() -> None:
    class Model(Loop):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(super().forward(self.layer(x)).float())
            with half():
                return self.layer(self.layer(x)) + self.layer(x)

    torch.manual_seed(0)
    check("zb-h1", 2, Model(), batches_of(rows), loss_fn)


def test_casts_of_the_model_are_not_merged() -> None:
    class Model(Loop):
        def forward(self, x: Tensor) -> Tensor:
            with half():
                x = x @ self.layer.weight.to(torch.bfloat16) + x @ self.layer.weight.bfloat16()
                return self.last(self.first(x) + F.linear(x, self.layer.weight))

    torch.manual_seed(0)
    check("zb-h1", 2, Model(), batches_of(rows), loss_fn)


def test_a_region_around_the_step() -> None:
    """The backward runs outside of the region, as torch recommends."""
    torch.manual_seed(0)
    model, batches = Loop("none"), batches_of(rows)

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

    check("zb-v", 2, Inside(), batches, in_half)
