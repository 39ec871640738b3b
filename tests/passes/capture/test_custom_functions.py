"""torch.autograd.Function in a model: loss and gradients are eager's, bit by bit, wherever the
model is cut."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

import zbcompile
from tests.support.functions import WAYS, WIDTH, Passed, Ways
from tests.support.training import AsEager
from zbcompile.batches.batch import flatten_batch
from zbcompile.compiler.compile_model import ExportedModel, export_step
from zbcompile.passes.errors import CaptureError

ROWS, MICROBATCHES = 16, 8
NAMES = tuple(name for name in WAYS if name != "module")  # it writes `.grad` itself


def as_eager(model: nn.Module, batch: Tensor, **options: Any) -> zbcompile.Pipeline:
    compared = AsEager(model, options.pop("microbatches", MICROBATCHES), **{"ranks": 1, **options})
    compared.step(batch, target=torch.ones(len(batch), WIDTH))
    assert not any("zbcompile" in str(node.target) for node in nodes_of(compared.pipe))
    return compared.pipe


def nodes_of(pipe: zbcompile.Pipeline) -> Iterator[torch.fx.Node]:
    for stage in pipe.program.stages:
        for piece in stage.pieces.values():
            yield from piece.module.graph.nodes


@pytest.fixture(scope="module")
def all_ways() -> tuple[Ways, ExportedModel]:
    """A model of all ways, captured once: what is cut and scheduled differently is the same
    graph."""
    torch.manual_seed(0)
    model, rows = Ways(*NAMES), torch.ones(ROWS, WIDTH)
    return model, export_step(
        model, flatten_batch((rows,), {}, rows, None).microbatch(0, MICROBATCHES), F.mse_loss
    )


SCHEDULES = {"1f1b": (10, 4), "zb-h1": (11, 4), "zb-v": (2, 8)}


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ways_cut_at_each(schedule: str, all_ways: tuple[Ways, ExportedModel]) -> None:
    """Every way is the first of a stage or the last of one, under one schedule at least."""
    model, exported = all_ways
    first, stages = SCHEDULES[schedule]
    cuts = [
        f"{'steps' if i % 2 else 'norms'}.{first + i * len(NAMES) // stages}"
        for i in range(stages - 1)
    ]
    with mock.patch("zbcompile.program_cache.programs.export_step", return_value=exported):
        as_eager(
            copy.deepcopy(model), torch.randn(ROWS, WIDTH), schedule=schedule, ranks=4, balance=cuts
        )


@pytest.mark.slow
def test_frozen_and_tied_weights() -> None:
    """Gradients follow what needs one in each call, and are added over stages."""
    model = Ways("saving", "needs_input_grad", "nested", "straight_through", "with_setup", "saving")
    for i in (0, 1, 3):
        model.steps[i].layer.weight.requires_grad_(False)
    model.steps[5].layer = model.steps[2].layer
    as_eager(
        model,
        torch.randn(ROWS, WIDTH),
        schedule="zb-v",
        ranks=2,
        balance=["steps.1", "steps.3", "norms.3"],
    )


def test_a_weight_that_a_function_and_a_layer_read_under_autocast() -> None:
    """Eager adds both gradients in float32."""
    as_eager(Ways("autocast"), torch.randn(ROWS, WIDTH), schedule="1f1b")


class Aliasing(nn.Module):
    """Changes what a Function returned for an argument without a gradient: its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        copy = x.clone()
        result: Any = Passed.apply(copy)
        result.add_(1.0)
        return self.layer(x) * copy + result


def test_a_result_without_gradient_is_still_its_argument() -> None:
    as_eager(Aliasing(), torch.randn(ROWS, WIDTH))


TABLE = torch.ones(WIDTH)


def double(ctx: Any, x: Tensor) -> Tensor:
    return x * 2


def half(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 0.5


def marked(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def branching(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient if gradient.sum() > 0 else gradient * 2


def keeping(ctx: Any, x: Tensor) -> Tensor:
    ctx.x = x
    return x * 2


def counting(ctx: Any, x: Tensor) -> Tensor:
    TABLE.add_(1)
    return x * 2


def assigning(ctx: Any, x: Tensor) -> Tensor:
    x.data = x + 1
    return x * 2


QUESTION, DATA = r"reads a value that depends on its inputs", r"assigns to the `\.data` of a tensor"
WRITTEN = r"in place.* [Rr]egister it with `?register_buffer"
VERSION = r"fails .*has been modified by an inplace operation"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "numpy": (
        double,
        lambda ctx, g: torch.from_numpy(g.numpy()),
        r"backward of .*test_custom_functions\.py:\d+.*numpy",
    ),
    "item": (double, lambda ctx, g: g * g.sum().item(), QUESTION),
    "a value decides": (double, branching, rf"{QUESTION} \(.*test_custom_functions\.py:\d+\)"),
    "address": (
        double,
        lambda ctx, g: g * g.data_ptr(),
        r"backward of .*test_custom_functions\.py:\d+",
    ),
    "random backward": (
        double,
        lambda ctx, g: g * torch.rand_like(g),
        r"the backward draws random numbers",
    ),
    "dirty": (marked, half, VERSION),
    "writes around": (counting, half, WRITTEN),
    "gives away memory": (assigning, half, rf"{DATA} \(.*test_custom_functions\.py:\d+\)"),
    "writes around in backward": (double, counting, WRITTEN),
    "writes an input in backward": (keeping, lambda ctx, g: g * ctx.x.mul_(2), VERSION),
    "random module": (
        lambda ctx, x: x * random.random(),
        half,
        r"Python's random module .*pass it as an input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """In eager mode too, or where a graph would lose something."""
    forward, backward, expected = REFUSED[case]
    odd = type(
        "Odd", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    with pytest.raises(CaptureError, match=f"(?s){expected}"):
        as_eager(Changing(odd), torch.randn(ROWS, WIDTH))


def test_gradients_that_a_function_writes_itself_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"support/functions\.py:\d+\).*pass them as arguments, and return"
    ):
        as_eager(Ways("saving", "module"), torch.randn(ROWS, WIDTH))


class Changing(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](self.function.apply(torch.tanh(self.layers[0](x))))


def test_a_transposed_gradient_meets_code_that_copies_it() -> None:
    """The backward is traced with the strides that arrive: what a view can do for one form, a copy
    does for another."""

    def flat(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1).view(gradient.shape) * 2

    class Transposing(Changing):
        def forward(self, x: Tensor) -> Any:
            return self.layers[1](self.function.apply(torch.tanh(self.layers[0](x)).t()).t())

    odd = type(
        "Odd", (Function,), {"forward": staticmethod(double), "backward": staticmethod(flat)}
    )
    as_eager(Transposing(odd), torch.randn(ROWS, WIDTH))


@pytest.mark.slow
def test_evaluations_and_saved_programs(tmp_path: Path) -> None:
    """A saved program has nothing of the functions."""
    batch, model = torch.randn(ROWS, WIDTH), Ways("saving", "nested", "no_grad", "random")
    pipe = as_eager(model, batch, schedule="zb-h1", ranks=2)
    pipe.program.save(tmp_path)
    assert zbcompile.load(tmp_path).program.stages
    model = Ways("saving", "nested", "no_grad", "non_differentiable").eval()
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=2, loss=F.mse_loss)
    torch.testing.assert_close(pipe.eval(batch), model(batch).detach())


@pytest.mark.slow
def test_a_region_with_re_entry_is_recomputed() -> None:
    names = ("saving", "reentrant_checkpoint", "saving", "reentrant_checkpoint")
    saved = {}
    for recompute in ("off", "hints"):
        torch.manual_seed(0)
        options = {"schedule": "zb-h1", "ranks": 2, "recompute": recompute}
        pipe = as_eager(Ways(*names), torch.ones(ROWS, WIDTH), **options)
        saved[recompute] = sum(stage.crossing.kept for stage in pipe.program.stages)
    assert saved["hints"] < saved["off"]
