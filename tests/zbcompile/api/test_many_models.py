"""Models of many kinds through the front door: loss, every gradient and every buffer bitwise equal
to eager's."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

WIDTH = 8


class Residual(nn.Module):
    """Linear layers around a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class PartlyFrozen(Residual):
    """Frozen and unused parameters, and one used only without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.silent = nn.Linear(WIDTH, WIDTH)
        self.layers[0].requires_grad_(False)
        self.layers[3].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.silent(x))
        return super().forward(x) * gate


class Shortcuts(Residual):
    """Skip connections over several stages, some used twice, and an integer activation."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            kept.append(x)
        return (
            x * torch.sigmoid(kept[0])
            + kept[0]
            - kept[1] * kept[2]
            + (kept[0].argmax(-1) % 3).unsqueeze(-1)
        )


class BiasTied(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].bias = self.layers[0].bias
        self.layers[5].bias = self.layers[0].bias


class Convolutions(nn.Module):
    """Batch norm: its running statistics are part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(4))
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x.flatten(1))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=10)
@pytest.mark.parametrize(("schedule", "ranks"), [("zb-h1", 2), ("zb-v", 2)])
@pytest.mark.parametrize("make", [Residual, PartlyFrozen, Shortcuts, BiasTied, Convolutions])
def test_a_step_equals_eager(make: Callable[[], nn.Module], schedule: str, ranks: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x, target = make(), torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    eager = copy.deepcopy(model)
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=ranks, microbatches=4, loss=F.mse_loss, exact=True
    )
    loss = pipe.step(x, target=target)
    losses = [F.mse_loss(eager(a), b) / 4 for a, b in zip(x.chunk(4), target.chunk(4), strict=True)]
    for part in losses:
        part.backward()
    assert torch.equal(loss, functools.reduce(torch.add, losses).detach())
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    torch.testing.assert_close(
        pipe.eval(x), eager.eval()(x).detach()
    )  # in chunks: other GEMM shapes, other last bits
