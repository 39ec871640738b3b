"""What only reports behind `if not torch.compiler.is_compiling():` is left out of a capture that it would prevent."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbcompile.passes.capture.export import Captured, capture
from zbcompile.passes.errors import CaptureError

WIDTH = 4
LOGGER = logging.getLogger(__name__)


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def write(self, value: float) -> None:
        self.values.append(value)

    def __call__(self, value: float) -> float:
        self.values.append(value)
        return value

    def __enter__(self) -> None:
        self.values.append(0.0)

    def __exit__(self, *error: Any) -> None:
        self.values.append(1.0)

    def mean(self) -> float:
        self.values.append(0.0)
        return 0.0


RECORDER = Recorder()


class Layers(nn.Module):
    """Two layers, and `look` in between, which may report."""

    def __init__(self, look: Callable[["Layers", Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.look, self.last, self.history, self.recorder = look, 1.0, list[float](), Recorder()
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        found = self.look(self, y)
        return self.other(y if found is None else found)  # type: ignore[no-any-return]


def captured(look: Callable[[Layers, Tensor], Any]) -> Captured:
    torch.manual_seed(0)
    return capture(Layers(look), (torch.randn(2, WIDTH),), {}, torch.randn(2, WIDTH), F.mse_loss)


def decides(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        largest = y.detach().abs().max()
        if largest > 1e4:
            LOGGER.warning("activations reach %.3f", float(largest))
        else:
            print(f"{largest.item():.1e}", end="", file=sys.stdout)


def sets_an_attribute(model: Layers, y: Tensor) -> None:
    if model.training and not torch.compiler.is_exporting():
        model.last = float(torch.linalg.vector_norm(y))


def returns_early(model: Layers, y: Tensor) -> None:
    if torch.compiler.is_compiling() or not model.training:
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            print(name, parameter.norm(2).tolist(), y.numpy().max())


def says_nothing(model: Layers, y: Tensor) -> None:
    pass


@pytest.mark.filterwarnings("ignore:zbcompile")
@pytest.mark.parametrize("look", [decides, sets_an_attribute, returns_early], ids=lambda look: look.__name__)
def test_a_report_is_left_out(look: Callable[[Layers, Tensor], Any]) -> None:
    with pytest.warns(UserWarning, match=r"test_reports\.py:\d+: if .* only reports something"):
        found = captured(look)
    assert str(found.module.graph) == str(captured(says_nothing).module.graph)


@pytest.mark.filterwarnings("ignore:zbcompile")
def test_a_report_that_a_trace_can_run_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(model: Layers, y: Tensor) -> None:
        if not torch.compiler.is_compiling():
            print(f"mean {y.mean().item():.3f}, %.3f, %d" % (y.max().item(), y.argmax().item()))

    captured(prints)
    assert capsys.readouterr().out.endswith(", nan, 0\n")


def scales(model: Layers, y: Tensor) -> Tensor:
    largest = 1.0
    if not torch.compiler.is_compiling():
        largest = float(y.max())
    return y / largest


def scales_in_place(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling() and y.max() > 3:
        y.div_(y.max().item())


def writes_by_out(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        print(float(torch.abs(y.detach(), out=y.detach()).max()))


def collects(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        model.history.append(float(y.max()))


def runs_a_module(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        print(float(model.norm(y).max()))


def raises(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        largest = float(y.max())
        if largest > 1e4:
            raise ValueError(largest)


def returns_a_value(model: Layers, y: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return y / float(y.max())
    return y


def tells_an_object_of_the_model(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        model.recorder.write(float(y.max()))


def asks_an_object_of_the_model(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        print(model.recorder.mean(), float(y.max()))


def tells_a_variable(model: Layers, y: Tensor) -> None:
    recorder = model.recorder
    if not torch.compiler.is_compiling():
        recorder.write(float(y.max()))


def tells_what_it_finds(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        for recorder in (model.recorder,):
            recorder.write(float(y.max()))


def log(value: float) -> None:
    RECORDER.write(value)


def calls_a_function_of_its_own(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        log(float(y.max()))


def names_a_method_like_a_builtin(model: Layers, y: Tensor) -> None:
    print = model.recorder.write
    if not torch.compiler.is_compiling():
        print(float(y.max()))


def prints_to_an_object_of_the_model(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        print(float(y.max()), file=model.recorder)  # type: ignore[arg-type]


def sorts_by_an_object_of_the_model(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        print(sorted(y.detach().flatten().tolist(), key=model.recorder))


def enters_an_object_of_the_model(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        with model.recorder:
            print(float(y.max()))


def changes_a_buffer(model: Layers, y: Tensor) -> None:
    if not torch.compiler.is_compiling():
        model.peak = y.detach().max()
        print(float(model.peak))


@pytest.mark.parametrize(
    "look",
    [
        *(scales, scales_in_place, writes_by_out, collects, runs_a_module, raises, returns_a_value),
        *(tells_an_object_of_the_model, asks_an_object_of_the_model, tells_a_variable, tells_what_it_finds),
        *(calls_a_function_of_its_own, names_a_method_like_a_builtin, changes_a_buffer),
        *(prints_to_an_object_of_the_model, sorts_by_an_object_of_the_model, enters_an_object_of_the_model),
    ],
    ids=lambda look: look.__name__,
)
def test_what_does_more_is_no_report(look: Callable[[Layers, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_reports\.py:\d+: .* makes a Python number, or a decision"):
        captured(look)


def test_what_forward_reads_of_a_report_is_refused() -> None:
    def remembers(model: Layers, y: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            model.last = float(y.max())
        return y * model.last

    with pytest.raises(CaptureError, match=r"forward changes model\.last .* and reads it"):
        captured(remembers)
