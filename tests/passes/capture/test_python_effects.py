"""What forward does in Python: numbers drawn outside torch are refused by line, output is mentioned once."""

import gc
import random
import warnings
from collections.abc import Callable
from random import uniform

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


GLOBAL, NOISE = random.Random(1), np.random.default_rng(1)
DRAW = GLOBAL.random


def drawing(own: random.Random) -> Callable[[Net], float]:
    return lambda net: own.random()


DRAWS = {
    "random": (lambda net: random.random(), r"Python's random module \(.*test_python_effects.*random\.random\(\)"),
    "by another name": (lambda net: uniform(0, 1), r"Python's random module;"),
    "numpy": (lambda net: float(np.random.rand()), r"numpy\.random \(.*np\.random\.rand\(\)"),
    "an instance": (lambda net: net.own.random(), r"the generator model\.own;"),
    "a generator of numpy": (lambda net: float(net.noise.random()), r"the generator model\.noise;"),
    "a global": (lambda net: GLOBAL.random(), r"the generator .*GLOBAL;"),
    "a global of numpy": (lambda net: float(NOISE.random()), r"the generator .*NOISE;"),
    "a bound method": (lambda net: DRAW(), r"the generator .*DRAW\.__self__;"),
    "a closure": (drawing(random.Random(1)), r"the generator own in the closure of model\.effect;"),
}


@pytest.mark.parametrize("how", DRAWS)
def test_numbers_from_elsewhere_are_refused(how: str) -> None:
    """They would be the same in every step: four steps gave one loss where eager's gave four."""
    effect, message = DRAWS[how]
    with pytest.raises(zbcompile.CaptureError, match=f"(?s)draws from {message}.*torch.rand"):
        train(Net(effect))


def _in_fork(net: Net) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return float(torch.ones(1).numel())


SEEDS: dict[str, Callable[[Net], object]] = {
    "torch": lambda net: torch.manual_seed(1),
    "the generator": lambda net: torch.default_generator.manual_seed(1),
    "any": lambda net: torch.seed(),
    "inside of fork_rng": _in_fork,
}


@pytest.mark.parametrize("how", SEEDS)
def test_seeds_in_forward_are_refused(how: str) -> None:
    """Eager would draw the same numbers in every step; the compiled steps drew others."""
    with pytest.raises(zbcompile.CaptureError, match=r"forward seeds torch's generator"):
        train(Net(lambda net: float(SEEDS[how](net) is None)))


@torch.library.custom_op("zbcompile_tests::untold", mutates_args=())
def _untold(x: Tensor) -> Tensor:
    return torch.rand_like(x)


_untold.register_fake(torch.empty_like)
_untold.register_autograd(lambda ctx, gradient: gradient * 0)


def test_an_operator_that_draws_without_saying_so_is_refused() -> None:
    class Drawing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + _untold(x)

    with pytest.raises(zbcompile.PipelineError, match=r"zbcompile_tests\.untold.* draws random numbers.*tags="):
        train(Drawing(lambda net: 0.0))


def test_output_is_mentioned_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def effect(net: Net) -> float:
        print("forward runs")
        return 0.0

    with pytest.warns(UserWarning, match=r"forward prints \(.*print\(.*happens once, at capture"):
        pipe = train(Net(effect))
    capsys.readouterr()
    pipe.step(ROWS, target=ROWS)
    assert "forward runs" not in capsys.readouterr().out


def test_a_number_that_is_read_for_logging_is_mentioned() -> None:
    class Logging(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last_mean = y.detach().mean().item()
            return y

    with pytest.warns(UserWarning, match=r"reads a number out of a tensor \(.*item\(\)"):
        train(Logging(lambda net: 0.0))


def test_what_draws_nothing_is_left_alone() -> None:
    before = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(Net(lambda net: 0.0))
    assert random.getstate() == before


COLLECTIONS = {"count": 0}


def count_collections(phase: str, _: dict[str, int]) -> None:
    if phase == "stop":
        COLLECTIONS["count"] += COLLECTIONS["count"] + 1


def test_what_a_garbage_collection_calls_is_not_forwards() -> None:
    """Such as hypothesis's clock of collections: one that comes inside of a trace is no change of forward's."""
    gc.callbacks.append(count_collections)
    try:
        before = COLLECTIONS["count"]
        train(Net(lambda net: 0.0 * gc.collect()))
    finally:
        gc.callbacks.remove(count_collections)
    assert COLLECTIONS["count"] > before
