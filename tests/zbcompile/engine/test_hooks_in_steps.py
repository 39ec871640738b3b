"""Hooks, gradients inside of forward and reparametrised weights are a part of the step: bit for bit
as in eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.support.oracle import MLP
from tests.support.refused import ROWS
from tests.support.training import AsEager


def compared_with_eager(kind: type[MLP] = MLP) -> AsEager:
    torch.manual_seed(0)
    model = kind(4)
    torch.manual_seed(0)
    return AsEager(model, 4, eager=kind(4), schedule="zb-h1", ranks=2)


HOOKS: tuple[Callable[[Any], Any], ...] = (
    lambda model: model.layers[2].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(None if i is None else 2 * i for i in inputs)
    ),
    lambda model: model.layers[1].register_full_backward_pre_hook(lambda _, grads: (3 * grads[0],)),
    lambda model: model.layers[2].weight.register_hook(lambda grad: grad * 0.5),
    lambda model: model.layers[3].bias.register_hook(torch.sign),
)


def test_hooks_that_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    """Of modules and parameters, the last layer's too: each compiles the step again; once they are
    removed, it finds the first program."""
    compared, handles = compared_with_eager(), []
    compared.step(ROWS, target=ROWS)
    for hook in HOOKS:
        handles += [hook(item) for item in (compared.model, compared.eager)]
        compared.step(ROWS, target=ROWS)
    for handle in handles:
        handle.remove()
    compared.step(ROWS, target=ROWS)
    assert capsys.readouterr().out.count("compiling again for other hooks of") == len(HOOKS)


class Hooked(MLP):
    """Changes gradients by hooks on an activation and on nodes of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x.register_hook(lambda gradient: 2 * gradient)
        x.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))  # type: ignore[union-attr]
        x = self.layers[1](x)
        edge = torch.autograd.graph.get_gradient_edge(x)
        edge.node.register_prehook(lambda grads: (grads[0] * 3,))
        return super().forward(x)


class Penalised(MLP):
    """Adds the square of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y, weight = super().forward(x), self.layers[0].weight
        (gradient,) = torch.autograd.grad(y.sum(), weight, create_graph=True)  # type: ignore[arg-type]
        return y + gradient.square().sum()


class Normed(MLP):
    """Hooks of torch.nn.utils replace its weights before every forward."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        nn.utils.weight_norm(self.layers[0])  # type: ignore[type-var]
        prune.l1_unstructured(self.layers[1], "weight", amount=0.3)


@pytest.mark.parametrize("kind", [Hooked, Penalised, Normed])
def test_as_in_eager_mode(kind: type[MLP]) -> None:
    compared = compared_with_eager(kind)
    for _ in range(2):
        compared.step(ROWS, target=ROWS)
