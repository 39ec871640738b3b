"""Graphs without names: what counts as the same work."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from zbcompile.batches.example import Example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.stage.anonymous_graph import bare
from zbcompile.passes.torch_private import make_fx
from zbcompile.schedules import build

WIDTH = 8


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def traced(function: Callable[..., list[Tensor]], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_equal_stages_have_equal_texts() -> None:
    """Eight stages of one layer: those in the middle differ from each other in names alone."""
    model = Layers(8)
    cuts = CompileOptions(balance=tuple(f"layers.{i}" for i in range(1, 8)))
    program = compile_example(
        Example(model, (torch.zeros(2, WIDTH),)), build("zb-v", 4, 8), cuts
    ).program
    for name in ("F", "B", "W", "BW"):
        texts = [bare(stage.pieces[name].module).text for stage in program.stages]
        assert len(set(texts[1:-1])) == 1
        assert len({texts[1], texts[-1]}) == (1 if name == "W" else 2)


@pytest.mark.parametrize(
    "other",
    [
        (lambda x: [x * 2, x + 1.5], torch.zeros(2, 3)),
        (lambda x: [x + 1.5, x * 2], torch.zeros(2, 3)),
        (lambda x: [x * 2, x + 1], torch.zeros(3, 2)),
        (lambda x: [x * 2, x + 1], torch.zeros(3, 2).t()),
        (lambda x: [x * 2, x + 1], torch.zeros(2, 3, dtype=torch.float64)),
    ],
    ids=["number", "order of results", "shape", "strides", "dtype"],
)
def test_what_makes_a_difference(other: tuple[Callable[..., list[Tensor]], Tensor]) -> None:
    same = [bare(traced(lambda x: [x * 2, x + 1], torch.zeros(2, 3))).text for _ in range(2)]
    assert same[0] == same[1]
    assert bare(traced(other[0], other[1])).text != same[0]


def test_branches_count_by_what_they_do() -> None:
    def choose(factor: float) -> Callable[..., list[Tensor]]:
        return lambda flag, x: [torch.cond(flag, lambda x: x * factor, lambda x: x + 1, (x,))]

    inputs = torch.tensor(True), torch.zeros(2)
    texts = []
    for factor in (2.0, 2.0, 3.0):
        # or torch 2.15 makes the second number an input, which its own cond refuses
        torch.compiler.reset()
        texts.append(bare(traced(choose(factor), *inputs)).text)
    assert texts[0] == texts[1] != texts[2]
