"""Weights that are scaled by a buffer which every forward changes: the backward reads the value of
its microbatch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import AsEager

CHANGES = ("written", "assigned", "written later", "written later")


class Scaled(nn.Module):
    """A layer whose weight is scaled by a buffer, which changes before it is read (it is assigned
    or written in place) or afterwards."""

    def __init__(self, width: int, change: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.register_buffer("scale", torch.ones(()))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "assigned":
            self.scale = self.scale * 0.9
        elif self.change == "written":
            self.scale.mul_(0.9)
        y = x + torch.tanh(F.linear(x, self.weight * self.scale))
        if self.change == "written later":
            self.scale = self.scale * 0.9
        return y


@pytest.mark.parametrize(
    ("schedule", "dtype"), [("zb-h1", torch.float32), ("zb-v", torch.bfloat16)]
)
def test_products_with_changing_buffers_are_bitwise(schedule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled(8, change) for change in CHANGES)).to(dtype)
    compared = AsEager(model, 4, schedule=schedule, ranks=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, compared.eager)]
    for _ in range(3):
        compared.step(torch.randn(8, 8, dtype=dtype), target=torch.randn(8, 8, dtype=dtype))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
