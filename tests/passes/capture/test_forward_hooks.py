"""Forward hooks and pre-hooks are captured as eager runs them, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP
from tests.support.refused import ROWS
from tests.support.training import AsEager


def scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def look(module: nn.Module, args: Any, output: Tensor) -> None:
    """Keeps what it sees, as hooks that collect hidden states do."""
    vars(module).setdefault("seen", []).append(output.shape)


def with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return torch.tanh(output) + len(kwargs)


def every_kind(model: nn.Module) -> None:
    layers = model.layers
    layers[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    layers[1].register_forward_hook(look)
    layers[2].register_forward_hook(scale_output)
    layers[2].register_forward_hook(with_keywords, with_kwargs=True, prepend=True)
    layers[3].register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
    layers[4].register_forward_hook(scale_output, always_call=True)
    model.register_forward_hook(scale_output)


def compared(model: nn.Module, hooked: Callable[[nn.Module], object]) -> AsEager:
    """Against a copy of `model` with hooks."""
    eager = MLP(5)
    eager.load_state_dict(model.state_dict())
    hooked(eager)
    return AsEager(model, 4, eager=eager, schedule="zb-v", ranks=2)


def test_hooks_of_every_kind() -> None:
    model = MLP(5)
    every_kind(model)
    compared(model, every_kind).step(ROWS, target=ROWS)


class Lazily(MLP):
    """Installs a hook when it first runs, as transformers' models do, or in every forward."""

    once = True

    def forward(self, x: Tensor) -> Tensor:
        if not (self.once and hasattr(self, "installed")):
            self.installed = self.layers[2].register_forward_hook(scale_output)
        return super().forward(x)


@pytest.mark.slow
def test_a_hook_that_forward_installs_is_captured_once(capsys: pytest.CaptureFixture[str]) -> None:
    both = compared(Lazily(5), lambda model: model.layers[2].register_forward_hook(scale_output))
    for _ in range(2):
        both.step(ROWS, target=ROWS)
    assert "compiling again" not in capsys.readouterr().out


def test_a_forward_that_installs_a_hook_each_time_is_refused() -> None:
    model = Lazily(5)
    model.once = False
    with pytest.raises(zbcompile.CaptureError, match=r"changes the hooks of model\.layers\.2"):
        compared(model, lambda model: None).pipe.step(ROWS, target=ROWS)
