"""Operators that torch rewrites while it traces: the graph has to hold what eager runs."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.middle_stage import ORDERS, compile_middle, eager_gradients, run_in_order

LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x.transpose(1, 3),
    lambda x: x.permute(2, 0, 3, 1),
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x[..., 1:],
)
DROPOUTS = (F.dropout, F.alpha_dropout, F.dropout2d, F.feature_alpha_dropout)


class Drops(nn.Module):
    """Dropouts of drawn kinds, probabilities and layouts, in one precision."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = random.Random(seed)
        self.dtype = dtype
        self.weights = nn.ParameterList(torch.rand(2, 3, 4, 5) for _ in range(8))
        self.calls = [(drawn.choice(DROPOUTS), drawn.choice(LAYOUTS), drawn.uniform(0.01, 0.6)) for _ in self.weights]

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            torch.sin(drop(lay((x * weight).to(self.dtype)), probability, True)).sum(0).flatten()
            for weight, (drop, lay, probability) in zip(self.weights, self.calls, strict=True)
        ]
        return torch.cat(parts).float()


@pytest.mark.slow
@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_dropout_has_eagers_bits(seed: int, dtype: torch.dtype) -> None:
    """Mask and scale, forward and backward: 1 / (1 - p) rounds to other bits where it is computed in another precision
    or order, in float32 for every fifth probability."""
    torch.manual_seed(seed)
    compiled = compile_middle(Drops(seed, dtype), torch.randn(2, 3, 4, 5))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []  # type: ignore[arg-type]


class Rewritten(nn.Module):
    """The other operators that have a second implementation for tracing; two of them have no kernel for halves."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weights = nn.ParameterList(torch.rand(4, 8) for _ in range(9))
        self.labels = nn.Buffer(torch.tensor([0, 3, 7, 1]))

    def forward(self, x: Tensor) -> Tensor:
        values = [(x * weight).to(self.dtype) for weight in self.weights]
        images = [value[None, None] for value in values]
        made = [
            F.softshrink(values[0], 0.3),
            F.hardshrink(values[1], 0.3),
            F.multi_margin_loss(values[2].float(), self.labels),
            F.interpolate(images[3], scale_factor=1.7, mode="nearest"),
            F.interpolate(images[4], scale_factor=1.7, mode="nearest-exact"),
            F.interpolate(images[5], scale_factor=1.7, mode="bilinear"),
            F.interpolate(images[6], scale_factor=1.7, mode="bicubic"),
            F.interpolate(images[7].float(), scale_factor=0.6, mode="bilinear", antialias=True),
            F.interpolate(values[8][None], scale_factor=1.7, mode="linear"),
        ]
        return torch.cat([value.flatten() for value in made]).float()


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_that_tracing_rewrites_have_eagers_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compiled = compile_middle(Rewritten(dtype), torch.randn(4, 8))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []  # type: ignore[arg-type]


class Unused(nn.Module):
    """Draws numbers that no result needs between others, as an encoder does that nobody listens to."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            F.dropout(F.dropout(x, 0.2, True) @ weight, 0.3, True)
            x = F.dropout(x, 0.2, True) @ weight
        return x


def test_unused_random_numbers_are_drawn_as_in_eager() -> None:
    torch.manual_seed(0)
    compiled = compile_middle(Unused(), torch.randn(3, 4))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []  # type: ignore[arg-type]


class Chunks(nn.Module):
    """Attention over chunks of a sequence that has one chunk only: each slice is all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weights[0]
        query, context = x[:, 0:9], x[:, 0:9]
        mixed = torch.softmax(query @ self.weights[1] @ (context @ self.weights[2]).mT, -1) @ context
        return torch.tanh(mixed @ self.weights[3] + x)


def test_a_slice_of_everything_groups_gradients_as_in_eager() -> None:
    torch.manual_seed(0)
    compiled = compile_middle(Chunks(), torch.randn(4, 9, 16))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []  # type: ignore[arg-type]


PRODUCTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.prod(),
    lambda x: x.prod(-1, keepdim=True),
    lambda x: torch.prod(input=x, dim=0),
    lambda x: x.prod(1, True, dtype=torch.float64).float(),
    lambda x: x.sum().prod() + x.sum().prod(0),
    lambda x: torch.complex(x, x + 1).prod(1, True).real,
)


class Multiplies(nn.Module):
    """Products of factors, of which the first `zeros` of each row are zero."""

    def __init__(self, zeros: int) -> None:
        super().__init__()
        self.zeros = zeros
        self.weights = nn.ParameterList(torch.randn(4, 6) for _ in PRODUCTS)

    def forward(self, x: Tensor) -> Tensor:
        factors = [torch.where(torch.arange(6) < self.zeros, 0, x * weight) for weight in self.weights]
        parts = [torch.sin(multiply(each)).flatten() for multiply, each in zip(PRODUCTS, factors, strict=True)]
        return torch.cat(parts)


@pytest.mark.parametrize("zeros", range(3))
def test_the_gradient_of_a_product_has_eagers_bits(zeros: int) -> None:
    """Eager divides by each factor unless one is zero; a trace cannot look."""
    torch.manual_seed(zeros)
    compiled = compile_middle(Multiplies(zeros), torch.randn(4, 6))
    expected = eager_gradients(compiled)
    found = run_in_order(compiled, ORDERS["delayed"])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []  # type: ignore[arg-type]
