"""An exported step is the training step: its results have the bits of eager mode."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import uncut_as_eager
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.errors import CaptureError

WIDTH = 8


class Repeated(nn.Module):
    """Applies one layer `times` times, behind a function of the module and its inputs."""

    def __init__(self, times: int = 1, before: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.times, self.before = times, before
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if self.before is None else self.before(self, *args, **kwargs)
        for _ in range(self.times):
            x = x + torch.tanh(self.layer(x))
        return x


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def assert_equals_eager(model: nn.Module, *more: Any, **options: Any) -> Any:
    return uncut_as_eager(model, ((rows(), *more), {}, rows()), F.mse_loss, **options)


class Decaying(nn.Module):
    """A module that assigns its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 0.9
        return x * self.scale


@pytest.mark.parametrize("shared", [Decaying(), nn.BatchNorm1d(WIDTH)], ids=["assigned", "norm"])
def test_a_module_with_two_paths_that_writes_its_buffers(shared: nn.Module) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared]
    step = assert_equals_eager(nn.Sequential(*layers))
    assert all(name.startswith("1.") for name in step.buffer_updates)


def of_no_input(model: nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(4)
    return x * 2 if bool((positions.diff() == 1).all()) and positions.tolist()[-1] == 3 else x


def of_numbers(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Tensors of numbers that were computed, as transformers' positions of images."""
    ends = [length.max() + 1 for length in lengths]
    halves = torch.tensor([length.double() / 3 for length in lengths])
    assert halves.dtype == torch.float64
    return x * torch.tensor(ends)[:, None] + halves.sin().sum().float()


def test_values_that_depend_on_no_input_or_on_static_ones_may_be_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no other path of the model is taken
        assert_equals_eager(Repeated(1, of_no_input))
    model, lengths = Repeated(1, of_numbers), torch.tensor([1, 2, 3, 4])
    with pytest.raises(CaptureError, match=rf"reads a value.*{__file__}:\d+.*static_inputs"):
        export_training_step(model, (rows(), lengths), {}, rows(), F.mse_loss)
    assert_equals_eager(model, lengths, static_inputs=("args[1]",))


def reads(model: nn.Module, x: Tensor, lengths: Tensor, mask: Tensor, by: str) -> Tensor:
    value = model.layer(x).sum() if by == "activation" else (lengths * mask).max()
    return x * int(value) + x[mask.bool()].sum()


REMOVE = r"reads a value[^=]*\(torch\.where, masks; use torch.stack for lists\)\. Remove"


@pytest.mark.parametrize(
    ("by", "message"),
    [("inputs", r'pass static_inputs=\("lengths", "mask"\)'), ("activation", REMOVE)],
)
def test_refusals_name_the_static_inputs(by: str, message: str) -> None:
    inputs = {"lengths": torch.tensor([1, 2, 3, 4]), "mask": torch.ones(4).long(), "by": by}
    with pytest.raises(CaptureError, match=message):
        export_training_step(Repeated(1, reads), (rows(),), inputs, rows(), F.mse_loss)


@pytest.mark.parametrize("p", [0.025, 0.1, 0.5])
def test_dropout_has_eagers_bits_in_any_layout(p: float) -> None:
    assert_equals_eager(Repeated(1, lambda m, x: F.dropout(m.layer(F.dropout(x.t(), p).t()), p)))


def attention(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = model.layer(x)[None, None]
        return F.scaled_dot_product_attention(x, x, x)[0, 0].float()


def test_parameters_on_the_meta_device() -> None:
    """The graph is that of real parameters, also for another shape of the batch."""
    for count in (4, 6):
        batch = (torch.randn(count, WIDTH),), {}, torch.randn(count, WIDTH), F.mse_loss
        models = Repeated(2, attention), Repeated(2, attention).to("meta")
        texts = [str(export_training_step(model, *batch).graph) for model in models]
        assert texts[0] == texts[1]
        assert "flash_attention" in texts[0]


def clamped(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight.clamp_(-0.1, 0.1)
    return x


def data_in_place(model: nn.Module, x: Tensor) -> Tensor:
    model.layer.weight.data.clamp_(-0.1, 0.1)
    return x


@pytest.mark.parametrize("write", [clamped, data_in_place])
def test_writes_to_parameters_are_refused(write: Any) -> None:
    with pytest.raises(CaptureError, match=r"forward writes a parameter|assigns to the `.data`"):
        assert_equals_eager(Repeated(1, write))


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batch norm, channels last": (nn.BatchNorm2d(WIDTH), (0, 3, 1, 2)),
    "layer norm": (nn.LayerNorm(5), (0, 2, 1)),
    "group norm": (nn.GroupNorm(2, WIDTH), (0, 2, 1)),
    "gated convolution": (nn.Sequential(nn.Conv1d(WIDTH, 16, 1), nn.GLU(1)), (0, 2, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_fake_strides_are_those_of_the_kernels(name: str) -> None:
    layer, order = LAYERS[name]
    back = [order.index(dim) for dim in range(len(order))]
    model = Repeated(1, lambda m, x: m.norm(m.layer(x).permute(order)).permute(back))
    model.norm = layer
    x = torch.randn((4, 5, WIDTH) if len(order) == 3 else (4, 5, 3, WIDTH))
    uncut_as_eager(model, ((x,), {}, x), F.mse_loss)
