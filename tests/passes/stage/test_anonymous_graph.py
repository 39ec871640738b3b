"""Graphs without names: what counts as the same work."""

from collections.abc import Callable

import torch
from torch import Tensor

from zbcompile.passes.stage.anonymous_graph import bare
from zbcompile.passes.torch_private import make_fx


def text(function: Callable[..., list[Tensor]], *inputs: Tensor) -> str:
    torch.compiler.reset()  # or torch 2.15 makes the second number an input, which its cond refuses
    return bare(make_fx(function, tracing_mode="fake")(*inputs)).text


def choose(factor: float) -> Callable[..., list[Tensor]]:
    return lambda flag, x: [torch.cond(flag, lambda x: x * factor, lambda x: x + 1, (x,))]


def test_what_makes_a_difference() -> None:
    """A number, the order of results, shape, strides and dtype of inputs, and what branches do."""
    zeros, inputs = torch.zeros(2, 3), (torch.tensor(True), torch.zeros(2))
    same, other = text(lambda x: [x * 2, x + 1], zeros), text(choose(2.0), *inputs)
    assert same == text(lambda x: [x * 2, x + 1], zeros)
    assert other == text(choose(2.0), *inputs)
    texts = [
        *(same, text(lambda x: [x * 2, x + 1.5], zeros), text(lambda x: [x + 1, x * 2], zeros)),
        *(text(lambda x: [x * 2, x + 1], x) for x in (zeros.view(3, 2), zeros.view(3, 2).t())),
        text(lambda x: [x * 2, x + 1], zeros.double()),
        *(other, text(choose(3.0), *inputs)),
    ]
    assert len(set(texts)) == len(texts)
