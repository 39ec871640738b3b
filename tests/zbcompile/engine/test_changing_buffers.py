"""Weights that are scaled by a buffer which every forward changes: the backward reads the value of
its microbatch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import AsEager


class Scaled(nn.Module):
    """The scale changes before it is read ("assigned", "written" in place) or afterwards."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8)
        self.register_buffer("scale", torch.ones(()))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "assigned":
            self.scale = self.scale * 0.9
        elif self.change == "written":
            self.scale.mul_(0.9)
        y = x + torch.tanh(F.linear(x, self.weight * self.scale))
        if self.change == "later":
            self.scale = self.scale * 0.9
        return y


@pytest.mark.parametrize(
    ("schedule", "dtype"), [("zb-h1", torch.float32), ("zb-v", torch.bfloat16)]
)
def test_products_with_changing_buffers_are_bitwise(schedule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*map(Scaled, ("written", "assigned", "later", "later"))).to(dtype)
    compared = AsEager(model, 4, schedule=schedule, ranks=2)
    for _ in range(2):
        compared.step(torch.randn(8, 8, dtype=dtype), target=torch.randn(8, 8, dtype=dtype))
