"""Hooks, gradients inside of forward and compiled submodules are a part of the step: bit for bit as
in eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import zbcompile
from tests.support.oracle import MLP, Batch, eager_step
from tests.support.refused import ROWS


def compare(pipe: zbcompile.Pipeline, model: nn.Module, eager: nn.Module) -> None:
    """One more step of both: equal losses and gradients."""
    for item in (model, eager):
        item.zero_grad()
    step = pipe.step_index
    loss = pipe.step(ROWS, target=ROWS)
    assert torch.equal(loss, eager_step(eager, F.mse_loss, Batch((ROWS,), {}, ROWS), 4, step))
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


def pipeline_of(model: nn.Module) -> zbcompile.Pipeline:
    return zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=4, loss=F.mse_loss, exact=True
    )  # type: ignore[no-any-return]


def made(kind: type[MLP] = MLP) -> Any:
    torch.manual_seed(0)
    return kind(4)


def doubled(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if item is None else 2 * item for item in grad_input)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: model.layers[2].register_full_backward_hook(doubled),
    "before a module": (
        lambda model: model.layers[1].register_full_backward_pre_hook(
            lambda _, grads: (3 * grads[0],)
        )
    ),
    "parameter": lambda model: model.layers[2].weight.register_hook(lambda grad: grad * 0.5),
    "bias of the last layer": lambda model: model.layers[3].bias.register_hook(torch.sign),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_is_there_or_comes_later(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is added to a compiled model, or removed: the step compiles again, and finds
    the old program."""
    model, eager = made(), made()
    pipe = pipeline_of(model)
    compare(pipe, model, eager)
    handles = [HOOKS[kind](item) for item in (model, eager)]
    compare(pipe, model, eager)
    for handle in handles:
        handle.remove()
    compare(pipe, model, eager)
    assert capsys.readouterr().out.count("compiling again for other hooks of") == 1


class Hooked(MLP):
    """Doubles the gradient of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x.register_hook(lambda gradient: 2 * gradient)
        return super().forward(x)


class OnNodes(MLP):
    """Changes gradients by hooks on nodes of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))  # type: ignore[union-attr]
        x = self.layers[1](x)
        torch.autograd.graph.get_gradient_edge(x).node.register_prehook(
            lambda grads: (grads[0] * 3,)
        )
        return super().forward(x)


class Penalised(MLP):
    """Adds the square of its own gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        weight: Any = self.layers[0].weight
        (gradient,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        return y + gradient.square().sum()


class Normed(MLP):
    """Hooks of torch.nn.utils replace its weights before every forward."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        nn.utils.weight_norm(self.layers[0])  # type: ignore[type-var]
        prune.l1_unstructured(self.layers[1], "weight", amount=0.3)


@pytest.mark.parametrize("kind", [Hooked, OnNodes, Penalised, Normed])
def test_as_in_eager_mode(kind: type[MLP]) -> None:
    model, eager = made(kind), made(kind)
    pipe = pipeline_of(model)
    compare(pipe, model, eager)
    compare(pipe, model, eager)
