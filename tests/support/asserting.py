"""Ways in which a forward requires something of its values; pytest rewrites asserts in files of
tests, not here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


def plain(x: Tensor) -> None:
    assert torch.isfinite(x).all()


def several(x: Tensor) -> None:
    assert not x.isnan().any() and not (x > 2).any(), f"bad: {x}"  # noqa: PT018


def after_a_flag(x: Tensor) -> None:
    checked = x.ndim == 2
    if checked and torch.isnan(x).any():
        raise ValueError("a NaN")
    else:
        assert checked


def of_numbers(x: Tensor) -> None:
    if not torch.isfinite(x).all().item() or (x.abs().max() > 2).item():
        raise ValueError


def over_lines(x: Tensor) -> None:
    good = torch.isfinite(x).all()
    assert good, "an element is not finite"
    assert x.max() < 2, "an element is too large"  # of all elements


def compared(x: Tensor) -> None:
    assert -2 < x.mean() < 2


def either(x: Tensor) -> None:
    assert x.numel() == 0 or x.sum() > 0


FORMS: tuple[Callable[[Tensor], None], ...] = (
    plain,
    several,
    after_a_flag,
    of_numbers,
    over_lines,
    compared,
    either,
)


def does_more(x: Tensor) -> None:
    if x.isnan().any():
        x.zero_()
        raise ValueError


def decides(x: Tensor) -> Any:
    assert (x.ndim if x.isnan().any() else 1) == 1


def one_of_two(x: Tensor) -> None:
    assert x.isnan().any() or x.isfinite().all()


def called(x: Tensor) -> None:
    assert any(each.isfinite().all() for each in x)


DECISIONS = (does_more, decides, one_of_two, called)


class Requiring(nn.Module):
    """Two layers, and what `require` wants of the output of each."""

    def __init__(self, require: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.require = require

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.require(x)
        return x
