"""The front door: a call, a decorator on a class, a decorator on a function; when it compiles."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from zbcompile.torch_private import TRIED, warn_of_untried

X, GOAL = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH), torch.zeros(8, WIDTH)
OPTIONS: Any = {"schedule": "zbv", "microbatches": 4, "ranks": 2, "loss": F.mse_loss}


@zbcompile.pipeline(**OPTIONS)
class Net(nn.Module):
    """A net of some depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@zbcompile.pipeline(**OPTIONS)
def make_net(depth: int = 6) -> nn.Module:
    """A net made by a function."""
    return MLP(depth)


@pytest.mark.parametrize("make", [Net, make_net])
def test_decorated_class_and_function(make: Any) -> None:
    pipe = make(depth=5)
    assert isinstance(pipe, zbcompile.Pipeline)
    assert pipe.step(X, target=GOAL).shape == ()
    assert len(list(pipe.parameters())) == 10
    assert (make.__name__, make.__doc__[:5]) in (("Net", "A net"), ("make_net", "A net"))


@pytest.mark.slow
def test_example_compiles_at_once() -> None:
    pipe = zbcompile.pipeline(MLP(), example=((X,), {"target": GOAL}), **OPTIONS)
    assert pipe.program.schedule.name == "zb-v"
    assert pipe.step_index == 0
    parameters = dict(pipe.model.named_parameters())
    assert all(parameter is parameters.pop(name) for name, parameter in pipe.named_parameters())
    assert not parameters


def test_an_untried_torch_warns_once() -> None:
    """Installing never changes the torch that is there, so this is where a new one is noticed."""
    with pytest.warns(UserWarning, match=r"tried with torch 2\.11.*, not with 9\.9\.1") as caught:
        list(map(warn_of_untried, ("9.9.1", *(f"{release}.0+cpu" for release in TRIED), "9.9.1")))
    assert len(caught) == 1
