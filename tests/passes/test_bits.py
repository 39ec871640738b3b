"""Pass graphs in the order of a schedule have eager's bits: losses, gradients, buffers."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gpt import GPT, next_byte_loss
from tests.support.pass_graph_runner import Batch, Runner, differences, eager_step
from tests.support.random_models import WIDTH as FEATURES, RandomModel
from tests.support.zoo import ZOO
from zbcompile import schedules
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph, compile_step

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


def test_gpt() -> None:
    """Dropout, and one weight for the embedding and the head."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, length=16, dropout=0.1, tied=True)
    placements = [("zb-h1", 2), ("zb-v", 2), ("zb-h1", 4)]
    check_schedules(placements, model, batches_of(text), next_byte_loss)


SAMPLE = ["llama-unpadded", "t5", "unet", "mixtral", "resnet"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow) for n in ZOO]
)
def test_zoo(name: str) -> None:
    if name in ("lstm", "llama-half-padded"):
        pytest.skip("not bitwise: oneDNN; masks that only some microbatches need")
    problem = ZOO[name]
    parts = problem.batches(1, 2 * MICROBATCHES)[0].parts(MICROBATCHES)
    batches = [(part.args, dict(part.kwargs), part.target) for part in parts]
    placements = [("zb-h1", 2), ("zb-v", 2)]
    check_schedules(placements, problem.model().train(), batches, problem.loss)


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


@pytest.mark.parametrize("seed", range(12))
def test_generated_models(seed: int) -> None:
    """Shared layers, buffers, dropout, writes in place, no_grad regions in any combination."""
    torch.manual_seed(seed)
    batches = [((torch.randn(6, FEATURES),), {}, torch.randn(6, FEATURES)) for _ in range(4)]
    placements = [("zb-h1", 2), ("zb-v", 2)]
    check_schedules(placements, RandomModel(seed).train(), batches, nn.functional.mse_loss)


class Branches(nn.Module):
    """Branches of torch.cond: one has a layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = torch.cond(x.sum() > 0, torch.sin, self.layers[0], (x,))
        return x


def test_branches() -> None:
    torch.manual_seed(0)
    model, batches = Branches(), batches_of(rows)
    check_schedules([("zb-h1", 2), ("zb-v", 2)], model, batches, nn.functional.mse_loss)
    assert export_training_step(model, *batches[0], nn.functional.mse_loss).eager_path
