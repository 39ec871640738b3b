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


def _in_fork(net: Net) -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.manual_seed(1) is None)


DRAWS: dict[str, tuple[Callable[[Net], float], str]] = {
    "numpy": (lambda net: float(np.random.rand()), r"numpy\.random \(.*effects\.py:\d+\)"),
    "an instance": (lambda net: net.own.random(), r"model\.own\."),
    "a generator of numpy": (lambda net: float(net.noise.random()), r"model\.noise\."),
    "a global": (lambda net: float(NOISE.random()), r"\S*NOISE\."),
    "a closure": (drawing(random.Random(1)), r"own in the closure of .*lambda"),
}
STATE = torch.get_rng_state()
SEEDS = {
    "torch": lambda net: float(torch.manual_seed(1) is None),
    "inside of fork_rng": _in_fork,
    "a state from elsewhere": lambda net: float(torch.set_rng_state(STATE) is None),
}
EFFECTS = {
    name: (d, f"(?s)draws from {message}.*torch.rand") for name, (d, message) in DRAWS.items()
}
SEEDED = "forward seeds torch's generator or restores its state"
EFFECTS |= {name: (seed, SEEDED) for name, seed in SEEDS.items()}


@pytest.mark.parametrize("name", EFFECTS)
def test_numbers_from_elsewhere_and_seeds_are_refused(name: str) -> None:
    """The numbers would be the same in every step, or others where eager's are the same."""
    effect, message = EFFECTS[name]
    with pytest.raises(zbcompile.CaptureError, match=message):
        train(Net(effect))


class Remembering(Net):
    """Leaves its output, and `reads` what the forward before has left."""

    def __init__(self, reads: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(lambda net: 0.0)
        self.reads, self.left = reads, None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        factor = self.reads(self.left, y)
        self.left = y.detach()
        return y * factor


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
