"""Hooks, gradients inside of forward and compiled submodules are a part of the step: bit for bit as
in eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.support.oracle import MLP
from tests.support.refused import ROWS
from tests.support.training import AsEager


def made(kind: type[MLP]) -> MLP:
    torch.manual_seed(0)
    return kind(4)


def compared_with_eager(kind: type[MLP] = MLP) -> AsEager:
    return AsEager(made(kind), 4, eager=made(kind), schedule="zb-h1", ranks=2)


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


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_is_there_or_comes_later(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is added to a compiled model, or removed: the step compiles again, and finds
    the old program."""
    compared = compared_with_eager()
    compared.step(ROWS, target=ROWS)
    handles = [HOOKS[kind](item) for item in (compared.model, compared.eager)]
    compared.step(ROWS, target=ROWS)
    for handle in handles:
        handle.remove()
    compared.step(ROWS, target=ROWS)
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
    compared = compared_with_eager(kind)
    for _ in range(2):
        compared.step(ROWS, target=ROWS)
