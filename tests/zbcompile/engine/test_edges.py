"""Values that cross from stage to stage, one small model per kind of edge, cut where the kind shows;
and random models cut at random. Loss and gradients are eager's, bit by bit."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import AsEager

WIDTH, ROWS, MICROBATCHES = 8, 8, 4


class Cut(nn.Module):
    """Layers a, b, c and d: a cut named after one of them comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class ManyUses(Cut):
    """A skip over every stage that each stage uses twice: the gradient is a sum of eight, last use
    first."""

    def forward(self, x: Tensor) -> Tensor:
        skip = y = torch.tanh(self.a(x))
        for layer in (self.b, self.c, self.d):
            y = torch.tanh(layer(y)) * skip + torch.sin(skip)
        return y * torch.cos(skip) + skip


class Inputs(Cut):
    """Inputs, integer ones too, that later stages use: nothing crosses for them."""

    def forward(self, x: Tensor) -> Tensor:
        largest = F.one_hot(x.argmax(1), WIDTH)
        y = torch.tanh(self.b(torch.tanh(self.a(x)) * x))
        return self.d(torch.tanh(self.c(y) - x)) * largest


class Integers(Cut):
    """An integer and a boolean activation, and one that needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        chosen, positive, shape = y.argmax(1, keepdim=True), y > 0, y.detach().exp()
        y = torch.tanh(self.b(y)).gather(1, chosen.expand(-1, WIDTH))
        y = torch.where(positive, torch.tanh(self.c(y)), y)
        return self.d(y * shape) + chosen


class NoParameters(Cut):
    """The second and third stage have one operation each, no parameter, and a value that they only
    pass on."""

    def forward(self, x: Tensor) -> Tensor:
        y, z = torch.tanh(self.a(x)), torch.sigmoid(self.b(x))
        y = y.sin()
        y = y.exp()
        return self.d(torch.tanh(self.c(y) * z))


class Views(Cut):
    """A view crosses: one of what arrived, a part of it, or both halves of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        turned, left, right = y.view(-1, 2, 4).transpose(1, 2), y[:, :4], y[:, 4:]
        y = torch.tanh(self.b(y))
        y = torch.tanh(self.c(y + turned.reshape(-1, WIDTH)))
        return self.d(y * torch.cat([right.exp(), left.sigmoid()], 1))


class Shapes(Cut):
    """A scalar, an expanded value and one without elements."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        scalar, wide, nothing = y.mean(), y.sum(1, keepdim=True).expand(-1, WIDTH), y[:, :0]
        y = torch.tanh(self.b(y)) * scalar
        y = torch.tanh(self.c(y)) + wide.exp()
        return torch.cat([self.d(y), nothing.exp()], 1) * scalar.cos()


class OneGradientForTwo(Cut):
    """The two sides of a sum have one gradient, which both of two activations get."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        z = torch.sigmoid(self.b(x))
        return self.d(torch.tanh(self.c(y + z)))


class Ends(Cut):
    """The loss function sees a value of the first stage and the output twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tanh(self.a(x))
        y = self.d(torch.tanh(self.c(torch.tanh(self.b(first)))))
        return y, first, y


def _loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return F.mse_loss(output, target)
    return sum(
        (F.mse_loss(value, target) * (i + 1) for i, value in enumerate(output)),
        start=torch.zeros(()),
    )


BEFORE_LAYERS = ("b", "c", "d")
EDGES: dict[type[Cut], tuple[str, int, Sequence[str]]] = {  # schedule, ranks, cuts
    ManyUses: ("zb-v", 2, BEFORE_LAYERS),
    Inputs: ("zb-h1", 4, BEFORE_LAYERS),
    Integers: ("zb-v", 2, BEFORE_LAYERS),
    NoParameters: ("zb-h1", 4, ("sigmoid", "sin", "exp")),
    Views: ("zb-v", 2, BEFORE_LAYERS),
    Shapes: ("1f1b", 4, BEFORE_LAYERS),
    OneGradientForTwo: ("zb-h1", 4, ("sigmoid", "c", "d")),
    Ends: ("zb-v", 2, BEFORE_LAYERS),
}


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize("make", EDGES)
def test_edge(make: type[Cut]) -> None:
    torch.manual_seed(0)
    schedule, ranks, cuts = EDGES[make]
    model, x, target = make(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    options = {"schedule": schedule, "ranks": ranks, "balance": tuple(cuts)}
    AsEager(model, MICROBATCHES, _loss, **options).step(x, target=target)
