"""torch.autograd.Function in a model: loss and gradients are eager's, bit by bit, wherever the model is cut."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

import zbcompile
from tests.support.functions import WAYS, WIDTH, AsVjp, Needed, Passed, Reversed, Saving, Ways
from tests.support.oracle import Batch, eager_step
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.batches.batch import flatten_batch
from zbcompile.compiler.compile_exported import ExportedModel, export_step
from zbcompile.passes.capture.export import Captured, capture
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.partition.liveness import lay_out_line
from zbcompile.passes.partition.stage_graphs import cut
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.split.joint_graph import tangents_of, trace_joint

ROWS, MICROBATCHES = 16, 8


def as_eager(model: nn.Module, batch: Tensor, **options: Any) -> zbcompile.Pipeline:
    eager, target = copy.deepcopy(model), torch.ones(len(batch), WIDTH)
    options = {"ranks": 1, "microbatches": MICROBATCHES, **options}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, exact=True, **options)
    loss = pipe.step(batch, target=target)
    wanted = eager_step(eager, F.mse_loss, Batch((batch,), {}, target), options["microbatches"], 0)
    assert torch.equal(loss, wanted)
    assert_same_tensors(gradients_of(pipe), {n: p.grad for n, p in eager.named_parameters()}, "gradient")
    assert not any("zbcompile" in str(node.target) for node in nodes_of(pipe))
    return pipe


def nodes_of(pipe: zbcompile.Pipeline) -> Iterator[torch.fx.Node]:
    for stage in pipe.program.stages:
        for piece in stage.pieces.values():
            yield from piece.module.graph.nodes


@pytest.fixture(scope="module")
def all_ways() -> tuple[Ways, ExportedModel]:
    """A model of all ways, captured once: what is cut and scheduled differently is the same graph."""
    torch.manual_seed(0)
    model, rows = Ways(*WAYS), torch.ones(ROWS, WIDTH)
    return model, export_step(model, flatten_batch((rows,), {}, rows, None).microbatch(0, MICROBATCHES), F.mse_loss)


SCHEDULES = {"1f1b": (12, 4), "zb-h1": (11, 4), "interleaved-1f1b": (1, 8), "zb-v": (2, 8), "dualpipe-v": (3, 8)}


@pytest.mark.mostly_slow(every=5)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ways_cut_at_each(schedule: str, all_ways: tuple[Ways, ExportedModel]) -> None:
    """Every way is the first of a stage or the last of one, under one schedule at least."""
    model, exported = all_ways
    first, stages = SCHEDULES[schedule]
    cuts = [f"{'steps' if i % 2 else 'norms'}.{first + i * len(WAYS) // stages}" for i in range(stages - 1)]
    with mock.patch("zbcompile.program_cache.programs.export_step", return_value=exported):
        as_eager(copy.deepcopy(model), torch.randn(ROWS, WIDTH), schedule=schedule, ranks=4, balance=cuts)


@pytest.mark.slow
def test_all_ways_on_one_stage(all_ways: tuple[Ways, ExportedModel]) -> None:
    model, exported = all_ways
    with mock.patch("zbcompile.program_cache.programs.export_step", return_value=exported):
        as_eager(copy.deepcopy(model), torch.randn(ROWS, WIDTH), schedule="1f1b")


@pytest.mark.slow
def test_frozen_and_tied_weights() -> None:
    """Gradients follow what needs one in each call, and are added over stages."""
    model = Ways("saving", "needs_input_grad", "nested", "module", "with_setup", "saving")
    for i in (0, 1, 3):
        model.steps[i].layer.weight.requires_grad_(False)
    model.steps[5].layer = model.steps[2].layer
    as_eager(model, torch.randn(ROWS, WIDTH), schedule="zb-v", ranks=2, balance=["steps.1", "steps.3", "norms.3"])


def test_a_saved_program_has_none_of_it(tmp_path: Path) -> None:
    batch = torch.randn(ROWS, WIDTH)
    pipe = as_eager(Ways("saving", "module", "random"), batch, schedule="zb-h1", ranks=2)
    pipe.program.save(tmp_path)
    assert zbcompile.load(tmp_path).program.stages


@pytest.mark.slow
def test_evaluation_runs_forward() -> None:
    model = Ways("saving", "module", "no_grad", "non_differentiable")
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=2, loss=F.mse_loss)
    batch = torch.randn(4, WIDTH)
    pipe.compile(batch, target=batch)
    model.eval()
    torch.testing.assert_close(pipe.eval(batch), model(batch))


class Repeated(nn.Module):
    """Equal layers, each a Function's call and an ordinary layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(Saving.apply(x, layer.weight, layer.bias, 0.5)))
        return x


def test_equal_stages_are_compiled_once() -> None:
    cuts = ["layers.1", "layers.2", "layers.3"]
    pipe = as_eager(Repeated(5), torch.randn(ROWS, WIDTH), schedule="1f1b", ranks=4, balance=cuts)
    assert [stage.original for stage in pipe.program.stages] == [0, 2, 2, 3]


@pytest.mark.slow
def test_a_region_with_re_entry_is_recomputed() -> None:
    names = ("saving", "reentrant_checkpoint", "saving", "reentrant_checkpoint")
    kept = {}
    for recompute in ("off", "hints"):
        torch.manual_seed(0)
        pipe = as_eager(Ways(*names), torch.ones(ROWS, WIDTH), schedule="zb-h1", ranks=2, recompute=recompute)
        kept[recompute] = sum(stage.crossing.kept for stage in pipe.program.stages)
    assert kept["hints"] < kept["off"]


def captured(run: Callable[[Any, nn.ModuleList], Any]) -> Captured:
    """The capture of a model of two layers, of which the second is frozen."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.layers[1].requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return run(torch.tanh(self.layers[0](x)), self.layers)

    return capture(Model(), (torch.ones(2, WIDTH),), {}, torch.ones(2, WIDTH), F.mse_loss)


SHARED = {  # whether two calls, added up, are one operator
    "equal": (True, lambda x, layers: Reversed.apply(x, 2.0) + Reversed.apply(x.sin(), 2.0)),
    "number": (False, lambda x, layers: Reversed.apply(x, 2.0) + Reversed.apply(x, 3.0)),
    "kind of number": (False, lambda x, layers: Reversed.apply(x, 1) + Reversed.apply(x, True)),
    "sign of zero": (False, lambda x, layers: Reversed.apply(x, 0.0) + Reversed.apply(x, -0.0)),
    "needs a gradient": (
        False,
        lambda x, layers: Needed.apply(x, layers[0].weight) + Needed.apply(x, layers[1].weight),
    ),
    "shape": (False, lambda x, layers: AsVjp.apply(x) + AsVjp.apply(x[:1])),
    "strides": (False, lambda x, layers: AsVjp.apply(x @ x.T).sum() + AsVjp.apply((x @ x.T).T)[0, 0] + x),
    "dtype": (False, lambda x, layers: AsVjp.apply(x) + AsVjp.apply(x.double()).float()),
    "function": (False, lambda x, layers: AsVjp.apply(x) + Reversed.apply(x, 1.0)),
}


@pytest.mark.mostly_slow(every=6, suite=1)
@pytest.mark.parametrize("case", SHARED)
def test_calls_share_an_operator_if_they_are_equal(case: str) -> None:
    expected, run = SHARED[case]
    found = captured(run)
    assert (len(found.functions) == 1) is expected
    calls = found.module.graph.find_nodes(op="call_function", target=torch.ops.zbcompile.function.default)
    assert {node.args[1] for node in calls} == {call.name for call in found.functions}


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


AROUND = SimpleNamespace(scale=1.0, table=torch.ones(WIDTH))
OTHERS = iter([torch.ones(WIDTH), torch.zeros(WIDTH)])


def double(ctx: Any, x: Tensor) -> Tensor:
    return x * 2


def half(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 0.5


def marked(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def branching(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient if gradient.sum() > 0 else gradient * 2


def by_hand(ctx: Any, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x.clone()


def scaling(ctx: Any, x: Tensor) -> Tensor:
    ctx.scale = AROUND.scale
    return x.view_as(x)


def keeping(ctx: Any, x: Tensor) -> Tensor:
    ctx.x = x
    return x * 2


def freeing(ctx: Any, gradient: Tensor) -> Tensor:
    x, ctx.x = ctx.x, None
    return gradient * x * 2


def counting(ctx: Any, x: Tensor) -> Tensor:
    AROUND.table.add_(1)
    return x * 2


def assigning(ctx: Any, x: Tensor) -> Tensor:
    x.data = x + 1
    return x * 2


def normalising(ctx: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, AROUND.table.clone(), AROUND.table.clone(), training=True)


NUMPY = r"numpy.*Write it with torch operations, or as a torch\.library\.custom_op"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "numpy": (double, lambda ctx, g: torch.from_numpy(g.numpy()), r"Odd .*test_custom.*backward that cannot.*" + NUMPY),
    "numpy in forward": (lambda ctx, x: torch.from_numpy(x.numpy()), half, r"forward that cannot be traced.*" + NUMPY),
    "item": (
        double,
        lambda ctx, g: g * g.sum().item(),
        r"backward that cannot .*test_custom_fun.*item\(\)",
    ),
    "a value decides": (double, branching, r"backward that cannot be traced .*if gradient\.sum\(\) > 0"),
    "address": (double, lambda ctx, g: g * g.data_ptr(), r"backward that cannot be traced .*no memory to point to"),
    "random backward": (double, lambda ctx, g: g * torch.rand_like(g), r"draws random numbers in its backward"),
    "dirty": (marked, half, r"changes one of its inputs in place"),
    "dirty in secret": (by_hand, half, r"changes one of its inputs in place"),
    "number of gradients": (double, lambda ctx, g: (g, g), r"backward that cannot .*incorrect number of gradients"),
    "writes around": (counting, half, r"test_custom.*changes a tensor around it in place"),
    "gives away memory": (
        assigning,
        half,
        r"forward that cannot be traced .*assigns to tensor\.data \(.*x\.data = x \+ 1",
    ),
    "gives away memory in backward": (double, assigning, r"backward that cannot be traced .*assigns to tensor\.data"),
    "running statistics": (normalising, half, r"test_custom.*updates the running statistics of a batch norm"),
    "writes around in backward": (double, counting, r"test_custom.*changes a tensor around it in place"),
    "writes an input in backward": (keeping, lambda ctx, g: g * ctx.x.mul_(2), r"in place, in its backward"),
    "another tensor": (double, lambda ctx, g: g * next(OTHERS), r"test_custom.* reads a tensor in its backward that"),
    "random module": (lambda ctx, x: x * random.random(), half, r"Python's random module .*pass it as an input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    forward, backward, expected = REFUSED[case]
    odd = type("Odd", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def run(x: Any, layers: nn.ModuleList) -> Any:
        with mock.patch.multiple(AROUND, scale=2.0):
            return layers[1](odd.apply(x))

    with pytest.raises(CaptureError, match=expected):
        compiled(captured(run))


def compiled(captured: Captured) -> None:
    canonical = canonicalise(captured)
    line = lay_out_line(canonical)
    (stage,) = cut(canonical, line, dict.fromkeys(line.nodes, 0), 1)
    trace_joint(stage, captured.trainable, tangents_of(stage, None))


CHANGING: dict[str, tuple[Any, Any]] = {  # what forward changes around the Function before the next call
    "number": (lambda ctx, x: x * AROUND.scale, half),
    "number kept for backward": (scaling, lambda ctx, g: g * ctx.scale),
    "number read by backward": (double, lambda ctx, g: g * AROUND.scale),
    "number as a tensor": (lambda ctx, x: x * torch.tensor(AROUND.scale), half),
    "branch": (lambda ctx, x: (x if AROUND.scale == 2.0 else x.sin()) * 2, half),
    "ctx": (keeping, freeing),
}


class Changing(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        with mock.patch.multiple(AROUND, scale=2.0):
            x = self.function.apply(torch.tanh(self.layers[0](x)))
        return self.layers[1](x)


@pytest.mark.parametrize("case", CHANGING)
def test_what_has_changed_since_the_call_is_as_in_eager(case: str) -> None:
    forward, backward = CHANGING[case]
    odd = type("Odd", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    as_eager(Changing(odd), torch.randn(ROWS, WIDTH))


def test_a_transposed_gradient_meets_code_that_copies_it() -> None:
    """The backward is traced with the strides that arrive: what a view can do for one form, a copy does for another."""

    def flat(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1).view(gradient.shape) * 2

    class Transposing(Changing):
        def forward(self, x: Tensor) -> Any:
            return self.layers[1](self.function.apply(torch.tanh(self.layers[0](x)).t()).t())

    odd = type("Odd", (Function,), {"forward": staticmethod(double), "backward": staticmethod(flat)})
    as_eager(Transposing(odd), torch.randn(ROWS, WIDTH))
