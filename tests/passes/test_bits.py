"""Pass graphs in the order of a schedule have eager's bits: losses, gradients, buffers."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.pass_graph_runner import Batch, Runner, compile_step, differences, eager_step
from zbcompile import schedules
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph

MICROBATCHES = 4


def compile_for(
    schedule: str, ranks: int, model: nn.Module, batch: Batch, loss: Any, exact: bool = True
) -> tuple[CompiledStep, Sequence[Any]]:
    """Returns the pass graphs for a schedule, and the schedule's orders."""
    built = schedules.build(schedule, ranks=ranks, microbatches=MICROBATCHES)
    ranks_of = [built.placement.rank(stage) for stage in range(built.stages)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_step(model, *batch, loss, ranks_of=ranks_of, exact=exact), built.orders


def check(
    schedule: str, ranks: int, model: nn.Module, batches: list[Batch], loss: Any
) -> CompiledStep:
    compiled, orders = compile_for(schedule, ranks, model, batches[0], loss)
    result = Runner(compiled, model, batches, seed=5).run(orders)
    assert not differences(result, eager_step(model, batches, loss, seed=5))
    return compiled


def check_schedules(
    placements: Sequence[tuple[str, int]], model: nn.Module, batches: list[Batch], loss: Any
) -> None:
    """Checks several schedules, given by name and ranks, with one export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = export_training_step(model, *batches[0], loss)
    expected = eager_step(model, batches, loss, seed=5)
    for name, ranks in placements:
        built = schedules.build(name, ranks=ranks, microbatches=MICROBATCHES)
        ranks_of = [built.placement.rank(stage) for stage in range(built.stages)]
        compiled = compile_graph(step.copy(), ranks_of=ranks_of, exact=True)
        result = Runner(compiled, model, batches, seed=5).run(built.orders)
        assert not differences(result, expected), name


def batches_of(make: Callable[[], Batch]) -> list[Batch]:
    torch.manual_seed(1)
    return [make() for _ in range(MICROBATCHES)]


def text() -> Batch:
    tokens = torch.randint(256, (2, 16))
    return (tokens,), {}, tokens


class Loop(nn.Module):
    """A universal transformer: one layer, applied ten times, on several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for _ in range(10):
            x = x + torch.tanh(self.layer(self.norm(x)))
        return x


def rows() -> Batch:
    return (torch.randn(4, 8),), {}, torch.randn(4, 8)


def test_a_block_applied_ten_times() -> None:
    torch.manual_seed(0)
    placements = [("zb-h1", 2), ("zb-v", 2), ("1f1b", 2), ("gpipe", 2)]
    check_schedules(placements, Loop(), batches_of(rows), nn.functional.mse_loss)


def test_default_sums_over_stages_are_within_rounding() -> None:
    torch.manual_seed(0)
    model, batches = Loop(), batches_of(rows)
    compiled, orders = compile_for(
        "zb-v", 2, model, batches[0], nn.functional.mse_loss, exact=False
    )
    assert not [label for label in compiled.passes if label.kind == "E"]
    result = Runner(compiled, model, batches, seed=5).run(orders)
    expected = eager_step(model, batches, nn.functional.mse_loss, seed=5)
    for name, gradient in expected.gradients.items():
        error = (result.gradients[name] - gradient).abs().max()
        assert error <= 1e-6 * gradient.abs().max()
