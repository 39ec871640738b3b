"""Helpers for tests over the whole family of schedules."""

import random
from collections.abc import Callable

import pytest

from zbcompile.schedules import Costs


@pytest.fixture
def random_costs() -> Callable[[random.Random, int], Costs]:
    """`random_costs(generator, stages)`: whole numbers, so that every sum is exact; some passes
    empty."""

    def make(generator: random.Random, stages: int) -> Costs:
        ends = {"forward": (1, 20), "backward": (1, 20), "weight": (0, 20)}
        ends |= {"activation": (10, 20), "residue": (0, 10)}
        drawn = {n: tuple(generator.randint(*e) for _ in range(stages)) for n, e in ends.items()}
        return Costs(**drawn, comm=generator.choice((0, 1, 5, 30)))

    return make
