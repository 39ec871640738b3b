"""A capture is shared with nothing that would be captured differently."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.oracle import MLP
from tests.support.shared_captures import sketch
from tests.support.stored_captures import FOLDER, capture_to_bytes, from_bytes, read_or_make
from tests.support.training import problem_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.export import Captured, capture
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.pass_list.passes_in_order import canonicalise

X = torch.zeros(2, 32)


def noted(module: nn.Module, inputs: Any) -> None:
    """A hook that pickles."""


def tie(model: MLP) -> None:
    model.layers[1].weight = model.layers[0].weight


CHANGES: dict[str, Callable[[MLP], Any]] = {
    "mode": lambda model: model.layers[1].eval(),
    "frozen": lambda model: model.layers[1].requires_grad_(False),
    "tied": tie,
    "hook": lambda model: model.layers[1].register_forward_pre_hook(noted),
    "attribute": lambda model: setattr(model, "scale", 2.0),
    "precision": lambda model: model.layers[1].double(),
    "buffer": lambda model: model.register_buffer("seen", torch.zeros(1)),
    "one more layer": lambda model: model.layers.append(nn.Linear(32, 32)),
    "another device": lambda model: model.to("meta"),
}


def of(model: nn.Module, *given: Any) -> bytes | None:
    return sketch(model, *(given or ((X,), {}, X, F.mse_loss)))


def test_values_of_tensors_do_not_matter() -> None:
    assert of(MLP()) == of(MLP())
    assert of(MLP()) is not None


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_capture_reads_matters(change: str) -> None:
    model = MLP()
    CHANGES[change](model)
    assert of(model) != of(MLP())
    assert of(model) is not None


def test_code_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(MLP())
    monkeypatch.setattr(MLP, "forward", lambda self, x: x)
    assert of(MLP()) != before


@pytest.mark.parametrize(
    "given",
    [
        ((X,), {}, X, F.l1_loss),
        ((X[:1],), {}, X, F.mse_loss),
        ((X.t().contiguous().t(),), {}, X, F.mse_loss),
        ((torch.zeros(2, 32),), {}, torch.zeros(2, 32), F.mse_loss),
    ],
    ids=["loss", "shape", "strides", "two tensors instead of one twice"],
)
def test_the_microbatch_matters(given: tuple[Any, ...]) -> None:
    assert of(MLP(), *given) != of(MLP())


def test_switches_matter() -> None:
    before = of(MLP())
    with torch.autocast("cpu"):
        assert of(MLP()) != before
    with torch.backends.mkldnn.flags(enabled=False):
        assert of(MLP()) != before


def test_what_is_read_back_is_what_was_written() -> None:
    """To the nodes' places in the model's source."""
    problem = problem_of("small-dropout")
    batch = problem.batches(1, 2)[0]
    written = capture(problem.model(), batch.args, batch.kwargs, batch.target, problem.loss)
    content = capture_to_bytes(written)
    assert content is not None
    read = from_bytes(content)
    assert replace(read, module=written.module) == written
    assert described(canonicalise(read)) == described(canonicalise(written))


def described(canonical: Canonical) -> list[Any]:
    nodes = canonical.graph.nodes
    return [(n.format_node(), str(n.meta["val"]), source_line(n), n.meta["differentiable"]) for n in nodes if n.meta]


def test_a_capture_is_made_once_and_read_if_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made = capture(MLP(), (X,), {}, X, F.mse_loss)
    calls: list[bool] = []

    def make(shared: bool = True) -> tuple[Captured, bool]:
        calls.append(shared)
        return made, shared

    read_or_make(b"here alone", lambda _: True, lambda: make(shared=False))
    read_or_make(b"here alone", lambda _: True, make)
    assert read_or_make(b"here alone", lambda _: True, make) is not made
    assert calls == [False, True]
    assert read_or_make(b"here alone", lambda _: False, make) is made
    assert read_or_make(b"another", lambda _: True, make) is made


def test_what_cannot_be_told_is_not_shared() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    class Local(nn.Module):
        pass

    hooked = MLP()
    hooked.layers[0].weight.register_hook(lambda gradient: gradient)
    assert [of(MLP(), (X,), {}, X, loss), of(Local()), of(hooked), of(torch.compile(MLP()))] == [None] * 4
