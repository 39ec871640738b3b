"""Batches, targets and losses of any structure: the passes have eager's bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import Runner, split_as_eager
from zbcompile.passes.capture.export import export_training_step
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

    def __init__(self, read: Callable[..., Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.last(torch.tanh(self.first(self.read(*args, **kwargs))))


def check(model: nn.Module, make: Callable[[], Any], loss: Any, **options: Any) -> Runner:
    return split_as_eager(model, [make() for _ in range(3)], loss, **options)


def read(
    x: Tensor,
    pair: Any,
    data: Any,
    batch: Any,
    mask: None,
    part: slice,
    *,
    dtype: torch.dtype,
    use_cache: bool = True,
    temperature: float = 1.0,
    mode: str = "",
) -> Tensor:
    assert mask is None
    x = x[part] * pair.factor + pair.first + data.x * data.scale
    x = (x + batch["inner"]["y"] * batch["list"][1]).to(dtype)
    return x if use_cache else x * temperature + len(mode)


def loss_of_all(output: Tensor, target: Any) -> Tensor:
    data, (other, factor) = target["data"], target["pair"]
    return F.mse_loss(output, data.x) * data.scale + F.l1_loss(output, other) * factor


def of_any_structure() -> Any:
    nested = {"inner": {"y": rows()}, "list": [rows(), 3]}
    args = (torch.randn(6, WIDTH), Pair(rows(), 2.0), Registered(rows()), nested, None, slice(1, 5))
    kwargs = {"dtype": torch.float32, "use_cache": False, "temperature": 0.5, "mode": "abc"}
    return args, kwargs, {"data": Registered(rows()), "pair": (rows(), 0.5)}


def test_inputs_and_targets_of_any_structure() -> None:
    check(Model(read), of_any_structure, loss_of_all)
    check(Model(), lambda: ((rows(),), {}, None), lambda output, target: output.square().mean())


def test_unknown_inputs_are_refused() -> None:
    """Their tensors would become constants of the graph."""
    model = Model(lambda data: data.x)
    with pytest.raises(CaptureError, match=r"contains a Data \(args\[0\]\).*register_dataclass"):
        export_training_step(model, (Data(rows()),), {}, rows(), F.mse_loss)


def test_one_tensor_as_input_and_target() -> None:
    """Two inputs of the graph: in a later batch they may be two tensors."""
    x = rows()
    step = export_training_step(Model(), (x,), {}, x, F.mse_loss)
    assert list(step.batch_inputs) == ["args[0]", "target"]


def test_outputs_and_metrics() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.mse_loss(output, target), {"error": (output - target).abs().mean(), "count": 3}

    model = Model()
    runner = check(model, lambda: ((rows(),), {}, rows()), loss, returns="outputs")
    values = [value for _, value in sorted(runner.outputs[2].items())]
    output, metrics = runner.compiled.step.output_structure.rebuild(values)
    (x,), _, target = runner.batches[2]
    assert torch.equal(output, model(x))
    assert metrics["count"] == 3
    assert torch.equal(metrics["error"], (output - target).abs().mean())
