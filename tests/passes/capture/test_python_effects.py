"""Refusals of Python in forward: numbers drawn outside of torch, seeds and carried tensors."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.refused import ROWS, train

WIDTH = ROWS.shape[1]


class Net(nn.Module):
    """Two layers, and something else in between."""

    def __init__(self, effect: Callable[["Net"], float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.effect = effect
        self.own = random.Random(1)
        self.noise = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x) * (1.0 + self.effect(self))


NOISE = np.random.default_rng(1)


def drawing(own: random.Random) -> Callable[[Net], float]:
    return lambda net: own.random()


DRAWS = {
    "numpy": (
        lambda net: float(np.random.rand()),
        r"numpy\.random \(.*test_python_effects\.py:\d+\)",
    ),
    "an instance": (lambda net: net.own.random(), r"model\.own\."),
    "a generator of numpy": (lambda net: float(net.noise.random()), r"model\.noise\."),
    "a global": (lambda net: float(NOISE.random()), r"\S*NOISE\."),
    "a closure": (drawing(random.Random(1)), r"own in the closure of .*lambda"),
}


@pytest.mark.parametrize("how", DRAWS)
def test_numbers_from_elsewhere_are_refused(how: str) -> None:
    """The numbers would be the same in every step: four steps gave one loss where eager's gave four."""
    effect, message = DRAWS[how]
    with pytest.raises(zbcompile.CaptureError, match=f"(?s)draws from {message}.*torch.rand"):
        train(Net(effect))


def _in_fork(net: Net) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return float(torch.ones(1).numel())


STATE = [torch.empty(0)]
SEEDS: dict[str, Callable[[Net], object]] = {
    "torch": lambda net: torch.manual_seed(1),
    "the generator": lambda net: torch.default_generator.manual_seed(1),
    "inside of fork_rng": _in_fork,
    "a state from elsewhere": lambda net: torch.set_rng_state(STATE[0]),
}


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("how", SEEDS)
def test_seeds_in_forward_are_refused(how: str) -> None:
    """Eager would draw the same numbers in every step; the compiled steps drew others."""
    STATE[0] = torch.get_rng_state()
    with pytest.raises(
        zbcompile.CaptureError, match="forward seeds torch's generator or restores its state"
    ):
        train(Net(lambda net: float(SEEDS[how](net) is None)))


class Remembering(Net):
    """Leaves what its first layer makes of a batch, and `reads` what the forward before has
    left."""

    def __init__(self, reads: Callable[[Tensor | None, Tensor], Any]) -> None:
        super().__init__(lambda net: 0.0)
        self.reads, self.left = reads, None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        factor = self.reads(self.left, y)
        self.left = y.detach()
        return y * factor


@pytest.mark.parametrize(
    "reads", [lambda left, y: 1.0 if left is None else left, lambda left, y: 1.0]
)
def test_a_tensor_that_each_forward_sets_is_mentioned(
    reads: Callable[[Tensor | None, Tensor], Any],
) -> None:
    """Vision models of transformers do this with values for the next token."""
    net = Remembering(reads)
    with pytest.warns(UserWarning, match=r"forward changes model\.left\. .*never does"):
        train(net)
    assert net.left is None


@pytest.mark.parametrize(
    "reads",
    [
        lambda left, y: 1.0 + y.new_zeros(()).copy_(left.mean()),
        lambda left, y: left.mean(),
        lambda left, y: 1.0 if left.shape == y.shape else 2.0,
    ],
    ids=["copy", "value", "shape"],
)
def test_a_tensor_of_the_forward_before_is_refused(reads: Callable[[Tensor, Tensor], Any]) -> None:
    net = Remembering(reads)
    net.left = torch.zeros(2, 2)
    with pytest.raises(zbcompile.CaptureError, match=r"changes model\.left and reads it"):
        train(net)


def _converts(net: Net) -> float:
    net.last = net.last.to(net.first.weight.dtype)
    net.first.cpu()
    return 1.0


def test_a_conversion_that_changes_nothing_is_none() -> None:
    """Routers of transformers' mixtures make sure of their dtype; torch asks for `.grad` on the
    way."""
    gradients = []
    for effect in (_converts, lambda net: 1.0):
        torch.manual_seed(0)
        net = Net(effect)
        train(net)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


@torch.fx.wrap
def _marked(x: Tensor) -> Tensor:
    return 2 * x


def test_a_function_that_fx_wraps_is_read_as_what_it_is() -> None:
    """A trace of torch puts another one in its place, and its closure; timm's attention has such
    functions."""

    class Marked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_marked(x))

    marked = _marked
    train(Marked(lambda net: 0.0))
    assert _marked is marked


def test_a_number_that_is_read_for_logging_is_mentioned() -> None:
    class Logging(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last_mean = y.detach().mean().item()
            return y

    net = Logging(lambda net: 0.0)
    with pytest.warns(
        UserWarning, match=r"forward changes model\.last_mean\. A compiled step runs no Python"
    ):
        train(net)
    assert not hasattr(net, "last_mean")
