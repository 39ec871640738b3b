"""torch.autograd.Function in a model: eager's bits, wherever the model is cut."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

import zbcompile
from tests.passes.capture.functions import PASSED, WAYS, WIDTH, Ways
from tests.support.training import AsEager
from zbcompile.passes.errors import CaptureError

ROWS = 16
NAMES = tuple(name for name in WAYS if name != "module")  # it writes `.grad` itself


def as_eager(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    compared = AsEager(model, 8, **{"ranks": 1, **options})
    compared.step(torch.randn(ROWS, WIDTH), target=torch.ones(ROWS, WIDTH))
    pieces = [p for stage in compared.pipe.program.stages for p in stage.pieces.values()]
    nodes = [node for piece in pieces for node in piece.module.graph.nodes]
    assert not any("zbcompile" in str(node.target) for node in nodes)
    return compared.pipe


@pytest.mark.slow
def test_all_ways_cut_at_each() -> None:
    """Cut before and behind some of them."""
    cuts = [f"{'steps' if i % 2 else 'norms'}.{1 + i * len(NAMES) // 8}" for i in range(7)]
    as_eager(Ways(*NAMES), schedule="zb-v", ranks=4, balance=cuts)


def test_frozen_and_tied_weights() -> None:
    """Gradients follow what needs one in each call, and are added over stages."""
    model = Ways("saving", "needs_input_grad", "nested", "with_setup", "saving")
    for i in (0, 1, 3):
        model.steps[i].layer.weight.requires_grad_(False)
    model.steps[4].layer = model.steps[2].layer
    as_eager(model, schedule="zb-v", ranks=2, balance=["steps.1", "steps.2", "norms.3"])


class Between(nn.Module):
    """Two layers with a function in between."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](self.function(torch.tanh(self.layers[0](x))))


def odd(forward: Any, backward: Any) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Odd", (Function,), methods).apply


def aliasing(x: Any) -> Any:
    """Changes what a Function returned for an argument without a gradient: its argument."""
    copy = x.detach().clone()
    result: Any = PASSED(copy)
    result.add_(1.0)
    return x * copy + result


def transposed(x: Tensor) -> Any:
    """The backward is traced with the strides that arrive: here a view would need a copy."""
    flat = odd(double, lambda ctx, g: g.reshape(-1).view(g.shape) * 2)
    return flat(x.t()).t()


@pytest.mark.parametrize("function", [aliasing, transposed])
def test_results_that_are_arguments_and_gradients_in_another_layout(function: Any) -> None:
    as_eager(Between(function))


TABLE = torch.ones(WIDTH)


def double(ctx: Any, x: Tensor) -> Tensor:
    return x * 2


def half(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 0.5


def marked(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def counting(ctx: Any, x: Tensor) -> Tensor:
    TABLE.add_(1)
    return x * 2


def assigning(ctx: Any, x: Tensor) -> Tensor:
    x.data = x + 1
    return x * 2


HERE = r"test_custom_functions\.py:\d+"
QUESTION = rf"reads a value that depends on its inputs \(.*{HERE}\)"
WRITTEN = r"in place.* [Rr]egister it with `?register_buffer"
VERSION = r"fails .*has been modified by an inplace operation"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "numpy": (double, lambda ctx, g: torch.from_numpy(g.numpy()), rf"backward of .*{HERE}.*numpy"),
    "branch": (double, lambda ctx, g: g if g.sum() > 0 else g * 2, QUESTION),
    "random": (double, lambda ctx, g: g * torch.rand_like(g), "backward draws random numbers"),
    "dirty": (marked, half, VERSION),
    "writes around": (counting, half, WRITTEN),
    "memory": (assigning, half, rf"assigns to the `\.data` of a tensor \(.*{HERE}\)"),
    "writes around in backward": (double, counting, WRITTEN),
    "module": (lambda ctx, x: x * random.random(), half, "Python's random module .*as an input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """In eager mode too, or where a graph would lose something."""
    forward, backward, expected = REFUSED[case]
    with pytest.raises(CaptureError, match=f"(?s){expected}"):
        as_eager(Between(odd(forward, backward)))


def test_gradients_that_a_function_writes_itself_are_refused() -> None:
    message = r"capture/functions\.py:\d+\).*pass them as arguments, and return"
    with pytest.raises(CaptureError, match=message):
        as_eager(Ways("saving", "module"))


@pytest.mark.slow
def test_saved_programs_and_regions_with_re_entry(tmp_path: Path) -> None:
    """A saved program has nothing of the functions; a region is recomputed."""
    saved = {}
    for recompute in ("off", "hints"):
        torch.manual_seed(0)
        model = Ways("saving", "reentrant_checkpoint", "saving", "reentrant_checkpoint")
        pipe = as_eager(model, schedule="zb-h1", ranks=2, recompute=recompute)
        saved[recompute] = sum(stage.crossing.kept for stage in pipe.program.stages)
    assert saved["hints"] < saved["off"]
    pipe.program.save(tmp_path)
    assert zbcompile.load(tmp_path).program.stages
    model, rows = Ways("nested", "no_grad", "non_differentiable").eval(), torch.randn(ROWS, WIDTH)
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=2, loss=F.mse_loss)
    torch.testing.assert_close(pipe.eval(rows), model(rows).detach())
