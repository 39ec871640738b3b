"""The front door: a call, a decorator on a class, a decorator on a function; when it compiles."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from zbcompile.torch_private import TRIED, warn_of_untried

X, GOAL = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH), torch.zeros(8, WIDTH)


@zbcompile.pipeline(schedule="zbv", microbatches=4, ranks=2, loss=F.mse_loss)
class Net(nn.Module):
    """A net of some depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@zbcompile.pipeline(schedule="zbv", microbatches=4, ranks=2, loss=F.mse_loss)
def make_net(depth: int = 6) -> nn.Module:
    """A net made by a function."""
    return MLP(depth)


def test_decorated_class() -> None:
    pipe = Net(depth=6)
    assert isinstance(pipe, zbcompile.Pipeline)
    assert pipe.step(X, target=GOAL).shape == ()
    assert len(list(pipe.parameters())) == 12
    assert (Net.__name__, Net.__doc__) == ("Net", "A net of some depth.")


def test_decorated_function() -> None:
    pipe = make_net(depth=5)
    assert pipe.step(X, target=GOAL).shape == ()
    assert len(list(pipe.parameters())) == 10
    assert make_net.__name__ == "make_net"


def test_example_compiles_at_once() -> None:
    pipe = zbcompile.pipeline(
        MLP(),
        schedule="zbv",
        microbatches=4,
        ranks=2,
        loss=F.mse_loss,
        example=((X,), {"target": GOAL}),
    )
    assert pipe.program.schedule.name == "zb-v"
    parameters = dict(pipe.model.named_parameters())
    assert all(parameter is parameters.pop(name) for name, parameter in pipe.named_parameters())
    assert not parameters
    assert pipe.step_index == 0


def test_an_untried_torch_warns_once() -> None:
    """Installing never changes the torch that is there, so this is where a new one is noticed."""
    with pytest.warns(UserWarning, match=r"tried with torch 2\.11.*, not with 9\.9\.1") as caught:
        list(map(warn_of_untried, ("9.9.1", *(f"{release}.0+cpu" for release in TRIED), "9.9.1")))
    assert len(caught) == 1
