"""Stages, ways of values between them, buffers and gradients of several stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.pass_graph_runner import compile_step
from tests.support.training import step_as_eager
from zbcompile import Pipeline
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.errors import CaptureError, PartitionError
from zbcompile.passes.graph.roles import ACTIVATION, GRADIENT
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.step_graph import Label

WIDTH = 8


def rows(count: int = 4) -> tuple[tuple[Tensor], dict[str, Any], Tensor]:
    return (torch.randn(count, WIDTH),), {}, torch.randn(count, WIDTH)


def check(schedule: str, model: nn.Module, loss: Any = F.mse_loss, ranks: int = 2) -> Pipeline:
    (x,), _, target = rows(16)
    return step_as_eager(model, x, target, loss, schedule=schedule, ranks=ranks)


class Residual(nn.Module):
    """A residual stream, whose first value is also read by the last layer."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return x * first


def compiled_on_four(model: nn.Module) -> CompiledStep:
    return compile_step(model, *rows(), F.mse_loss, ranks_of=range(4), exact=True)


def test_values_and_gradients_cross_each_cut_once() -> None:
    """A value that skips stages passes through them."""
    compiled = compiled_on_four(Residual())
    for stage in range(3):
        totals = []
        for label, role in ((Label(stage, "F"), ACTIVATION), (Label(stage + 1, "B"), GRADIENT)):
            graph = compiled.passes[label]
            pairs = [*zip(graph.outputs, graph.results, strict=True)]
            totals.append(storage_bytes(node for slot, node in pairs if slot.role == role))
        assert totals[0] == totals[1]
        names = {slot.name for slot in compiled.passes[Label(stage, "F")].outputs}
        assert "tanh" in names


def test_products_of_normalized_weights_wait_for_w() -> None:
    model = Residual()
    for layer in model.layers:
        parametrizations.weight_norm(layer)
    stages = check("zb-h1", model, ranks=4).program.stages
    graphs = [stage.pieces["W"].module.graph for stage in stages]
    mm = torch.ops.aten.mm.default
    assert sum(len(graph.find_nodes(op="call_function", target=mm)) for graph in graphs) == 4


class Leaky(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.rrelu(self.layers[0](x), training=True))


def test_inexact_operations_are_refused_with_exact() -> None:
    step = export_training_step(Leaky(), *rows(), F.mse_loss)
    with pytest.raises(CaptureError, match=rf"exact=True.*{__file__}.*Use exact=False"):
        compile_graph(step, ranks_of=(0, 1), exact=True)
    assert compile_graph(step, ranks_of=(0, 1)).stages == 2


class Normalized(nn.Module):
    """Batch norms, and a counter that the loss's temperature depends on."""

    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4))
        self.layers = nn.ModuleList(nn.Sequential(*each) for each in layers)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:  # reads the old average in forward and backward, and writes a new one
                x = x * self.average + x
                with torch.no_grad():
                    self.average = 0.9 * self.average + 0.1 * x.mean(0)
        self.count.add_(1)
        return x / (1 + self.count)


def test_buffers_that_the_step_writes() -> None:
    """Several microbatches are in flight: B reads the values of its own microbatch."""
    check("zb-v", Normalized())


class Momentum(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.last)
        self.last.copy_(y.detach().mean(0))
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(WIDTH, WIDTH), r"4 stages need 3\. Use fewer stages"),
        (Momentum(), r"a buffer that forward writes.*'last'.*one stage"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        compiled_on_four(model)


class Standardized(Residual):
    """Operations on parameters alone have one stage, which sends their result."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[0].weight
        flat = F.batch_norm(weight.reshape(1, WIDTH, -1), None, None, training=True)
        for layer in self.layers:
            x = torch.tanh(F.linear(layer(x), flat.view_as(weight)))
        return x


class Penalized(Residual):
    """The gradient of the output is part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x := x.detach().requires_grad_())
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square().mean()


def parametrized() -> nn.Module:
    """Weight norm and spectral norm: operations on parameters alone, and buffers of those."""
    first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    second = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def added_in_place(output: Tensor, target: Tensor) -> Tensor:
    """Models of transformers add the loss of a router like this: F returns it, not the backward."""
    total = F.mse_loss(output, target)
    total += 0.1 * output.square().mean()
    return total


@pytest.mark.parametrize("make", [Penalized, parametrized, Standardized])
def test_autograd_of_any_kind(make: Any) -> None:
    check("zb-v" if make is Standardized else "zb-h1", make(), added_in_place)
