"""Values that cross from stage to stage, one small model per kind of edge, cut where the kind shows;
and random models, which combine them: loss and gradients are eager's, bit by bit."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.training import (
    AsEager,
    Case,
    assert_bitwise,
    assert_same_tensors,
    gradients_of,
    quickly,
    reference,
)

WIDTH = 8


class Cut(nn.Module):
    """Layers a, b, c and d: a cut named after one of them comes before it."""

    def __init__(self, run: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.run(self, x)


def many_uses(m: Cut, x: Tensor) -> Tensor:
    """A skip that each stage uses twice: the gradient is a sum of eight, last use first."""
    skip = y = torch.tanh(m.a(x))
    for layer in (m.b, m.c, m.d):
        y = torch.tanh(layer(y)) * skip + torch.sin(skip)
    return y * torch.cos(skip) + skip


def inputs(m: Cut, x: Tensor) -> Tensor:
    """Inputs, integer ones too, that later stages use: nothing crosses for them."""
    largest = F.one_hot(x.argmax(1), WIDTH)
    y = torch.tanh(m.b(torch.tanh(m.a(x)) * x))
    return m.d(torch.tanh(m.c(y) - x)) * largest


def integers(m: Cut, x: Tensor) -> Tensor:
    """An integer and a boolean activation, and one that needs no gradient."""
    y = torch.tanh(m.a(x))
    chosen, positive, shape = y.argmax(1, keepdim=True), y > 0, y.detach().exp()
    y = torch.tanh(m.b(y)).gather(1, chosen.expand(-1, WIDTH))
    return m.d(torch.where(positive, torch.tanh(m.c(y)), y) * shape) + chosen


def no_parameters(m: Cut, x: Tensor) -> Tensor:
    """The second and third stage have one operation each, and a value that they only pass on."""
    y, z = torch.tanh(m.a(x)), torch.sigmoid(m.b(x))
    return m.d(torch.tanh(m.c(y.sin().exp()) * z))


def views(m: Cut, x: Tensor) -> Tensor:
    """A view crosses: one of what arrived, a part of it, or both halves of it."""
    y = torch.tanh(m.a(x))
    turned, left, right = y.view(-1, 2, 4).transpose(1, 2), y[:, :4], y[:, 4:]
    y = torch.tanh(m.c(torch.tanh(m.b(y)) + turned.reshape(-1, WIDTH)))
    return m.d(y * torch.cat([right.exp(), left.sigmoid()], 1))


def shapes(m: Cut, x: Tensor) -> Tensor:
    """A scalar, an expanded value and one without elements."""
    y = torch.tanh(m.a(x))
    scalar, wide, nothing = y.mean(), y.sum(1, keepdim=True).expand(-1, WIDTH), y[:, :0]
    y = torch.tanh(m.c(torch.tanh(m.b(y)) * scalar)) + wide.exp()
    return torch.cat([m.d(y), nothing.exp()], 1) * scalar.cos()


def one_gradient_for_two(m: Cut, x: Tensor) -> Tensor:
    """The two sides of a sum have one gradient, which both of two activations get."""
    return m.d(torch.tanh(m.c(torch.tanh(m.a(x)) + torch.sigmoid(m.b(x)))))


def ends(m: Cut, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss function sees a value of the first stage and the output twice."""
    first = torch.tanh(m.a(x))
    y = m.d(torch.tanh(m.c(torch.tanh(m.b(first)))))
    return y, first, y


def loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    values = [output] if isinstance(output, Tensor) else output
    return sum(
        (F.mse_loss(value, target) * (i + 1) for i, value in enumerate(values)), torch.zeros(())
    )


LAYERS = ("b", "c", "d")


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize(
    ("run", "schedule", "ranks", "cuts"),
    [
        (many_uses, "zb-v", 2, LAYERS),
        (inputs, "zb-h1", 4, LAYERS),
        (integers, "zb-v", 2, LAYERS),
        (no_parameters, "zb-h1", 4, ("sigmoid", "sin", "exp")),
        (views, "zb-v", 2, LAYERS),
        (one_gradient_for_two, "zb-h1", 4, ("sigmoid", "c", "d")),
        (shapes, "1f1b", 4, LAYERS),
        (ends, "zb-v", 2, LAYERS),
    ],
)
def test_edge(run: Callable[..., Tensor], schedule: str, ranks: int, cuts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    compared = AsEager(Cut(run), 4, loss, schedule=schedule, ranks=ranks, balance=cuts)
    compared.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))


def maybe_skips(m: Cut, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(x))
    return m.d(torch.tanh(m.c(torch.tanh(m.b(y)))) + (y if len(x) > 2 else 0))


@pytest.mark.slow
def test_microbatches_of_a_step_may_differ_in_what_skips() -> None:
    """The order of the step is that of one of their programs."""
    torch.manual_seed(0)
    model = Cut(maybe_skips)
    parts = [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for rows in (2, 3, 2, 3)]
    for part, target in parts:
        (F.mse_loss(model(part), target) / 4).backward()
    expected = gradients_of(model)
    model.zero_grad()
    options = {"schedule": "1f1b", "ranks": 4, "microbatches": 4, "balance": LAYERS}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, exact=True, **options)
    pipe.step(microbatches=[((part,), {}, target) for part, target in parts])
    assert_same_tensors(gradients_of(pipe), expected, "gradient of")


SCHEDULES = (("zb-h1", 2), ("zb-v", 2), ("1f1b", 3), ("interleaved-zb", 2), ("zb-v", 3))


@pytest.mark.mostly_slow(every=12, suite=4)
@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int) -> None:
    """`RandomModel(seed).recipe` is what the model of a seed does."""
    case = Case(f"random-{seed}", *SCHEDULES[seed % 5], microbatches=6, steps=2)
    assert_bitwise(quickly(case), reference(case))
