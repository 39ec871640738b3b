"""`zbcompile.explain`: what would be compiled, and everything unsupported,
without raising."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import MLP, WIDTH

ROWS = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
TOKENS = torch.arange(32).view(2, 16)


def explained(model: nn.Module, *args: Any, **options: Any) -> zbcompile.Explanation:
    return zbcompile.explain(
        model, *(args or (ROWS,)), **{"loss": F.mse_loss, "target": ROWS} | options
    )


@pytest.mark.slow
def test_a_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    """Its text is the explanation."""
    model = GPT(layers=1, width=32, heads=2, length=16, tied=True)
    outcome = explained(model, TOKENS, loss=next_byte_loss, target=TOKENS)
    assert capsys.readouterr().out == f"{outcome}\n"
    assert outcome.supported
    assert outcome.inputs == ("args[0] int64[2, 16]", "target int64[2, 16]")
    assert "1 tied to another" in outcome.parameters
    assert outcome.cuts > 10


class Changing(MLP):
    """Changes itself when it first runs, as transformers' models do; hooks, and second derivatives."""

    def __init__(self) -> None:
        super().__init__(3)
        self.calls, self.history = 0, ["built"]
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers[0].register_full_backward_hook(lambda *_: None)
        self.layers[1].weight.register_hook(lambda gradient: gradient)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            self.hooked = self.layers[0].register_forward_hook(lambda *_: None)
        self.calls += 1
        self.history.append("called")
        x = nn.functional.dropout(self.norm(self.layers[0](x)), 0.5)
        x.register_hook(lambda gradient: gradient)
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.sum(), self.layers[0].weight, create_graph=True)  # type: ignore[arg-type]
        return y + gradient.square().sum()


@pytest.mark.slow
def test_an_explanation_changes_nothing() -> None:
    """Parameters without a gradient are a note."""
    model = Changing()
    before = {name: repr(vars(module)) for name, module in model.named_modules()}
    generator, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    outcome = explained(model)
    assert {name: repr(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert outcome.supported
    assert any("forward changes model.calls" in note for note in outcome.notes)
    assert any("running_mean" in note and "dualpipe" in note for note in outcome.notes)
    model(ROWS)
    assert model.calls == 1
    assert model.layers[0]._forward_hooks


class Branching(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return x if x.sum() > 0 else -x


class Failing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such layer")


class WithHooks(MLP):
    def __init__(self) -> None:
        super().__init__(3)
        for layer in list(self.layers)[:2]:
            layer.weight.register_post_accumulate_grad_hook(print)  # type: ignore[union-attr, operator]


HERE = r"test_explain_model\.py:\d+"
PROBLEMS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Branching, {}, rf"reads a value that depends on its inputs \(.*{HERE}.*torch\.where"),
    (Failing, {}, rf"fails \(.*{HERE}\) with KeyError: 'no such layer'"),
    (MLP, {"loss": None}, r"the loss has shape \(2, 32\); expected one element"),
    (lambda: MLP().requires_grad_(False), {}, "the loss does not depend on a trained parameter"),
    (WithHooks, {}, "never run.*never run"),  # of several modules at once
]


@pytest.mark.parametrize(("make", "options", "message"), PROBLEMS)
def test_problems(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    problems = "\n".join(explained(make(), **options).problems)
    assert re.search(message, problems, re.DOTALL), problems


def test_without_a_loss_the_sum_of_the_outputs_shows_the_cuts() -> None:
    outcome = explained(MLP(), loss=None)
    assert "the sum of the outputs" in outcome.loss
    assert outcome.cuts


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.slow
def test_what_only_exact_refuses_is_a_note() -> None:
    outcome = explained(nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurrent(WIDTH, WIDTH)))
    assert outcome.supported
    assert any("exact=True is not possible" in note for note in outcome.notes)
