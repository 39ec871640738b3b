"""TARGETs for command lines that build a model on a mesh."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbcompile

WIDTH, ROWS = 32, 2


class Layer(nn.Module):
    """Columns, then rows, of which the ranks sum up the results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def layers(mesh: Any = None, count: int = 2) -> zbcompile.Example:
    """Layers whose matrices two ranks can share, and not four."""
    model = nn.Sequential(*(Layer() for _ in range(count)))
    if mesh is not None:
        if mesh["tp"].size() > 2:
            raise ValueError("at most 2 ranks")
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        model = parallelize_module(model, mesh["tp"], plan)
    x = torch.randn(ROWS, WIDTH)
    return zbcompile.Example(model, (x,), loss=nn.functional.mse_loss, target=x)


def whole(mesh: Any = None) -> zbcompile.Example:
    """It does nothing with the mesh."""
    return layers()


def batches() -> Iterator[Any]:
    """Four rows for each step."""
    for step in range(3):
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        yield (x,), {"target": x}
