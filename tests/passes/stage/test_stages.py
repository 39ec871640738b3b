"""Stages, ways of values between them, buffers and gradients of several stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import compile_step, output_bytes, owners_of
from tests.support.shared_parameters import Loop
from tests.support.training import step_as_eager
from zbcompile import Pipeline
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.errors import CaptureError, PartitionError
from zbcompile.passes.partition.assign_stages import cuts_of_owners
from zbcompile.passes.step_graph import Label

WIDTH = 8


def rows(count: int = 4) -> tuple[tuple[Tensor], dict[str, Any], Tensor]:
    return (torch.randn(count, WIDTH),), {}, torch.randn(count, WIDTH)


def check(schedule: str, ranks: int, model: nn.Module, loss: Any = F.mse_loss) -> Pipeline:
    (x,), _, target = rows(16)
    return step_as_eager(model, x, target, loss, schedule=schedule, ranks=ranks)


class Residual(nn.Module):
    """A residual stream, whose first value is also read by the last layer."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return x * first


def compiled_on_four(model: nn.Module, batch: Any = None) -> CompiledStep:
    return compile_step(model, *(batch or rows()), F.mse_loss, ranks_of=range(4), exact=True)


def test_gradients_cross_each_cut_once() -> None:
    compiled = compiled_on_four(Residual())
    for stage in range(3):
        sent = compiled.passes[Label(stage, "F")]
        returned = compiled.passes[Label(stage + 1, "B")]
        assert output_bytes(returned, "gradient") == output_bytes(sent, "activation")


def test_products_of_normalized_weights_wait_for_w() -> None:
    model = Residual()
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer)
    stages = check("zb-h1", 4, model).program.stages
    graphs = [stage.pieces["W"].module.graph for stage in stages]
    mm = torch.ops.aten.mm.default
    assert sum(len(graph.find_nodes(op="call_function", target=mm)) for graph in graphs) == 8


def test_values_that_skip_stages_pass_through_them() -> None:
    compiled = compiled_on_four(Residual())
    messages = [
        {
            slot.name
            for slot in compiled.passes[Label(stage, "F")].outputs
            if slot.role == "activation"
        }
        for stage in range(3)
    ]
    assert set.intersection(*messages) == {"tanh"}


def test_a_model_with_too_few_places_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"4 stages need 3\. Use fewer stages"):
        compiled_on_four(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RReLU])
def test_inexact_operations_are_refused_with_exact(layer: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer() if layer is nn.RReLU else layer(WIDTH, WIDTH)
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.enter(x))
            return self.leave(torch.tanh(y if isinstance(y, Tensor) else y[0]))

    step = export_training_step(Model(), *rows(), F.mse_loss)
    with pytest.raises(CaptureError, match=rf"exact=True.*{__file__}.*Use exact=False"):
        compile_graph(step, ranks_of=(0, 1), exact=True)
    assert compile_graph(step, ranks_of=(0, 1)).stages == 2


class Normalized(nn.Module):
    """Batch norms, and a counter that the loss's temperature depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(4)
        )
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


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "gpipe"])
def test_buffers_that_the_step_writes(schedule: str) -> None:
    """Several microbatches are in flight: B reads the values of its own microbatch."""
    check(schedule, 2, Normalized().train())


def test_a_buffer_read_and_written_on_different_stages_is_refused() -> None:
    class Momentum(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x + self.last)
            self.last.copy_(y.detach().mean(0))
            return y

    with pytest.raises(PartitionError, match=r"a buffer that forward writes.*'last'.*one stage"):
        compiled_on_four(Momentum())


def test_a_further_program_keeps_the_owners_of_parameters() -> None:
    model = Residual()
    compiled = compiled_on_four(model)
    longer = export_training_step(
        model, (torch.randn(9, WIDTH),), {}, torch.randn(9, WIDTH), F.mse_loss
    )
    again = compile_graph(
        longer,
        ranks_of=range(4),
        choose_cuts=lambda step, line: cuts_of_owners(step, line, owners_of(compiled), 4),
    )
    assert owners_of(again) == owners_of(compiled)


def test_a_loop_is_cut_anywhere() -> None:
    x = torch.randn(4, 32)
    compiled = compiled_on_four(Loop(10), ((x,), {}, x))
    assert owners_of(compiled)["block.weight"] == [0, 1, 2, 3]


def test_operations_on_parameters_alone_have_one_stage() -> None:
    """Their result is sent to other readers; parts of their tuples stay with them."""

    class Standardized(Residual):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.layers[0].weight
            flat = F.batch_norm(weight.reshape(1, WIDTH, -1), None, None, training=True)
            for layer in self.layers:
                x = torch.tanh(F.linear(layer(x), flat.view_as(weight)))
            return x

    check("zb-v", 2, Standardized())


class Hooked(Residual):
    """Hooks on an activation and on a module, and a write into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()
        self.tanh.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tanh(self.layers[0](x))
        x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        y = torch.zeros_like(x)
        y[:, :4] = x[:, 4:] * 2
        y[:, 4:].add_(x[:, :4])
        return super().forward(y)


class Penalized(Residual):
    """The gradient of the output is part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square().mean()


class Forces(Residual):
    """The output is the gradient of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return -gradient


def parametrized() -> nn.Module:
    """Weight norm and spectral norm: operations on parameters alone, and buffers of those."""
    parametrize = torch.nn.utils.parametrizations
    first = parametrize.weight_norm(nn.Linear(WIDTH, WIDTH))
    second = parametrize.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(WIDTH, WIDTH)).train()


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("make", [Hooked, Penalized, Forces, parametrized])
def test_autograd_of_any_kind(make: Any) -> None:
    torch.manual_seed(0)
    check("zb-h1", 2, make())


def test_a_loss_that_is_added_to_in_place() -> None:
    """Models of transformers add the loss of a router like this: F returns it, not the backward."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        total = F.mse_loss(output, target)
        total += 0.1 * output.square().mean()
        return total

    check("1f1b", 2, Residual(), loss)
