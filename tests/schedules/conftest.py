"""Helpers for tests over the whole family of schedules."""

import random
from collections.abc import Callable

import pytest

from zbcompile.schedules import Costs


@pytest.fixture
def random_costs() -> Callable[[random.Random, int], Costs]:
    """`random_costs(generator, stages)`: whole numbers, so that every sum is exact; some passes
    empty."""
    return _random_costs


def _random_costs(generator: random.Random, stages: int) -> Costs:
    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(generator.randint(low, high) for _ in range(stages))

    return Costs(
        forward=draw(1, 20),
        backward=draw(1, 20),
        weight=draw(0, 20),
        activation=draw(10, 20),
        residue=draw(0, 10),
        comm=generator.choice((0, 1, 5, 30)),
    )
