"""Evaluations one after the other: what has changed in between is seen or refused, and what is
asked for is checked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool

WIDTH = 8


class Counting(nn.Module):
    """Returns numbers next to its rows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"rows": x, "count": x.shape[0], "half": x.shape[0] / 2, "name": "counting"}


def loss_of(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(output["rows"], target)


def batch_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def made(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    options = {"schedule": "zb-h1", "ranks": 2, **options}
    return zbcompile.pipeline(model, microbatches=4, loss=loss_of, **options)


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    return made(Counting()).compile(batch_of(8), target=batch_of(8))


def assert_like_eager(pipe: zbcompile.Pipeline, x: Tensor) -> None:
    ours, theirs = pipe.eval(x), pipe._model(x)
    torch.testing.assert_close(ours.pop("rows"), theirs.pop("rows"), rtol=1e-6, atol=1e-6)
    assert ours == theirs


def test_hooks_that_come_and_go_are_seen(pipe: zbcompile.Pipeline) -> None:
    assert_like_eager(pipe, batch_of(8))
    hook = pipe._model.layers[3].register_forward_hook(lambda module, arguments, output: output * 2)  # type: ignore[index, union-attr, operator]
    assert_like_eager(pipe, batch_of(8))
    hook.remove()
    assert_like_eager(pipe, batch_of(8))
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, arguments, output: output * 2
    )
    try:
        with pytest.raises(zbcompile.CompileError, match="for all modules are registered"):
            pipe.eval(batch_of(8))
    finally:
        everywhere.remove()


@contextmanager
def replaced(layer: nn.Module, weight: nn.Parameter) -> Iterator[None]:
    before, layer.weight = layer.weight, weight
    try:
        yield
    finally:
        layer.weight = before


@contextmanager
def another_module(layers: nn.ModuleList) -> Iterator[None]:
    before, layers[3] = layers[3], nn.Linear(WIDTH, WIDTH, bias=False)
    try:
        yield
    finally:
        layers[3] = before


@contextmanager
def converted(layers: nn.ModuleList) -> Iterator[None]:
    layers.double()
    try:
        yield
    finally:
        layers.float()


CHANGES: dict[str, tuple[Callable[[nn.ModuleList], Any], str]] = {
    "parameter": (
        lambda layers: replaced(layers[3], nn.Parameter(torch.zeros(WIDTH, WIDTH))),
        "weight was replaced by another tensor",
    ),
    "tied": (
        lambda layers: replaced(layers[3], layers[0].weight),
        "weight was replaced by another tensor",
    ),
    "module": (another_module, "weight was replaced by another tensor"),
    "converted": (converted, "weight was float32.* and is float64"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_changed_model_is_refused(
    pipe: zbcompile.Pipeline, reference: zbcompile.Pipeline, change: str, frozen: bool
) -> None:
    pipe, (changed, reason) = reference if frozen else pipe, CHANGES[change]
    with changed(pipe._model.layers):  # type: ignore[arg-type]
        for rows in (8, 2):  # compiled, and not yet
            with pytest.raises((zbcompile.PipelineError, zbcompile.CompileError), match=reason):
                pipe.eval(batch_of(rows))
    assert_like_eager(pipe, batch_of(8))


@pytest.fixture(scope="module")
def reference() -> zbcompile.Pipeline:
    """Nothing trains, and it is evaluated."""
    frozen = made(Counting().requires_grad_(False))
    frozen.eval(batch_of(8))
    return frozen


def test_split_microbatches_have_one_form(pipe: zbcompile.Pipeline) -> None:
    x = batch_of(8)
    wrong: list[tuple[tuple[Any, ...], Any, str]] = [
        ((), [], r"microbatches=\[\]; expected one or more \(args, kwargs\)"),
        ((x,), "4", "microbatches='4'; expected"),
        ((), [(x,)], r"microbatches\[0\] is a tuple of another form"),
        ((), [((x,), {}), (x, {})], r"microbatches\[1\] is"),
        ((), [((x,), {}, x)], r"microbatches\[0\] is"),
        ((), [x], r"microbatches\[0\] is a Tensor"),
        ((x,), [((x,), {})], "other inputs were passed as well"),
    ]
    for args, microbatches, reason in wrong:
        with pytest.raises(zbcompile.PipelineError, match=reason) as raised:
            pipe.eval(*args, microbatches=microbatches)
        assert "\n" not in str(raised.value)
    for labels, microbatches, reason in [
        (x, [((x,), {}, x)], "passed as well"),
        (None, [((x,), {})], "kwargs, labels"),
    ]:
        with pytest.raises(zbcompile.PipelineError, match=reason):
            pipe.log_probs(labels=labels, microbatches=microbatches)


class Random(Counting):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"rows": F.dropout(super().forward(x)["rows"])}


def test_random_numbers_in_eval_mode_are_said_to_differ() -> None:
    with pytest.warns(UserWarning, match="draws random numbers in eval mode"):
        made(Random().requires_grad_(False)).eval(batch_of(8))


def calls_apart() -> tuple[list[str], Any]:
    """Returns the messages on two ranks that make different calls, and then the results with
    outputs="last"."""
    pipe, x, rank = (
        made(Counting().requires_grad_(False), schedule="1f1b", ranks=None),
        batch_of(8),
        dist.get_rank(),
    )
    pipe.eval(x)
    labels = torch.zeros(8, dtype=torch.int64)
    calls: list[Callable[[], Any]] = [
        lambda: pipe.eval(x, outputs=("all", "last")[rank]),
        lambda: pipe.eval(x, microbatches=1 + rank),
        lambda: pipe.eval(batch_of(8 - rank)),
        lambda: pipe.eval(microbatches=[((x[:2],), {})] * (1 + rank)),
        lambda: pipe.log_probs(x, labels=labels if rank else None),
        lambda: (pipe.eval, pipe.log_probs)[rank](x),
    ]
    reasons = []
    for call in calls:
        with pytest.raises(zbcompile.PipelineError) as raised:
            call()
        reasons.append(str(raised.value))
    return reasons, pipe.eval(x, outputs="last")


@pytest.mark.slow
def test_ranks_that_ask_for_different_things(pool: Pool) -> None:
    """Every rank says why, immediately, and the pipeline stays whole."""
    (reasons, first), (rest, last) = pool.run(calls_apart)
    assert reasons == rest
    words = ("outputs", "microbatches", "the inputs[0]", "the inputs", "the inputs[0]", "the call")
    for word, reason in zip(words, reasons, strict=True):
        assert f"the ranks evaluate different things: {word} is " in reason
    assert first is None
    with torch.no_grad():
        torch.testing.assert_close(last["rows"], Counting()(batch_of(8))["rows"])


@pytest.mark.slow
def test_compiled_in_inference_mode() -> None:
    """What is compiled and kept there serves outside, too."""
    pipe = made(Counting())
    with torch.inference_mode():
        x = batch_of(8).clone()
        pipe.compile(x, target=x)
        inside = pipe.eval(x, microbatches=2)
    assert torch.equal(pipe.eval(batch_of(8), microbatches=2)["rows"], inside["rows"])
    x = batch_of(8)
    torch.testing.assert_close(pipe.step(x, target=x), loss_of(pipe.model(x), x).detach())


@pytest.mark.slow
def test_what_was_evaluated_frozen_trains_later() -> None:
    """The program is then the step."""
    model, x = Counting().requires_grad_(False), batch_of(8)
    pipe = made(model)
    pipe.eval(x)
    model.requires_grad_(True)
    torch.testing.assert_close(pipe.step(x, target=x), loss_of(model(x), x).detach())
    assert {name for name, _ in model.named_parameters()} == set(pipe.program.trained)
