"""Batches, targets and losses of any structure: the passes have eager's bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import Batch, Runner, differences, eager_step
from zbcompile import schedules
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.errors import CaptureError

WIDTH = 8


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


class Pair(NamedTuple):
    first: Tensor
    factor: float


@dataclass
class Data:
    x: Tensor
    scale: float = 0.5
    mask: Any = None


@dataclass
class Registered(Data):
    pass


torch.export.register_dataclass(Registered)


class Model(nn.Module):
    """Two layers around whatever reads the inputs."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.last(torch.tanh(self.first(self.read(*args, **kwargs))))  # type: ignore[no-any-return]


def check(
    model: nn.Module, make: Callable[[], Batch], loss: Any, options: ExportOptions | None = None
) -> Runner:
    """Compares a step over four microbatches with eager mode, and returns its runner."""
    batches = [make() for _ in range(4)]
    step = export_training_step(model, *batches[0], loss, options)
    compiled = compile_graph(step, ranks_of=(0, 1), exact=True)
    runner = Runner(compiled, model, batches, seed=0)
    result = runner.run(schedules.build("zb-h1", ranks=2, microbatches=4).orders)
    assert not differences(result, eager_step(model, batches, loss, 0))
    return runner


def scaled(
    x: Tensor, *, use_cache: bool = True, temperature: float = 1.0, mode: str = ""
) -> Tensor:
    return x if use_cache else x * temperature + len(mode)


INPUTS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "python values": (
        scaled,
        lambda: ((rows(),), {"use_cache": False, "temperature": 0.5, "mode": "abc"}),
    ),
    "none": (lambda x, mask: x if mask is None else x * mask, lambda: ((rows(), None), {})),
    "nested": (
        lambda batch: batch["x"] * batch["inner"]["y"] + batch["list"][1],
        lambda: (({"x": rows(), "inner": {"y": rows()}, "list": [rows(), 3]},), {}),
    ),
    "named tuple": (lambda pair: pair.first * pair.factor, lambda: ((Pair(rows(), 2.0),), {})),
    "dataclass": (lambda data: data.x * data.scale, lambda: ((Registered(rows()),), {})),
    "dtype": (lambda x, dtype: x.to(dtype), lambda: ((rows(), torch.float32), {})),
    "slice": (lambda x, part: x[part], lambda: ((torch.randn(6, WIDTH), slice(1, 5)), {})),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    read, make = INPUTS[name]
    check(Model(read), lambda: (*make(), rows()), F.mse_loss)


TARGETS: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Tensor]]] = {
    "none": (lambda: None, lambda output, target: output.square().mean()),
    "tuple": (
        lambda: (rows(), rows(), 3),
        lambda output, target: F.mse_loss(output, target[0]) + target[2] * output.mean(),
    ),
    "mapping": (
        lambda: {"y": rows(), "weight": 0.5},
        lambda output, target: F.mse_loss(output, target["y"]) * target["weight"],
    ),
    "dataclass": (
        lambda: Registered(rows()),
        lambda output, target: F.mse_loss(output, target.x) * target.scale,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str) -> None:
    make, loss = TARGETS[name]
    check(Model(lambda x: x), lambda: ((rows(),), {}, make()), loss)


def test_unknown_inputs_are_refused() -> None:
    """Their tensors would become constants of the graph."""
    model = Model(lambda data: data.x)
    with pytest.raises(CaptureError, match=r"contains a Data \(args\[0\]\).*register_dataclass"):
        export_training_step(model, (Data(rows()),), {}, rows(), F.mse_loss)


def test_one_tensor_as_input_and_target() -> None:
    """Two inputs of the graph: in a later batch they may be two tensors."""
    x = rows()
    step = export_training_step(Model(lambda x: x), (x,), {}, x, F.mse_loss)
    assert list(step.batch_inputs) == ["args[0]", "target"]


def test_outputs_and_metrics() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.mse_loss(output, target), {"error": (output - target).abs().mean(), "count": 3}

    options = ExportOptions(returns="outputs")
    model = Model(lambda x: x)
    runner = check(model, lambda: ((rows(),), {}, rows()), loss, options)
    assert runner.compiled.step.output_structure is not None
    values = [value for _, value in sorted(runner.outputs[2].items())]
    output, metrics = runner.compiled.step.output_structure.rebuild(values)
    (args, _, target) = runner.batches[2]
    assert torch.equal(output, model(*args))
    assert metrics["count"] == 3
    assert torch.equal(metrics["error"], (output - target).abs().mean())


def test_a_tuple_that_begins_with_the_loss() -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            return output.square().mean(), output

    step = export_training_step(WithLoss(lambda x: x), (rows(),))
    assert all(step.gradients.values())
