"""Tests of what the backward keeps and what it computes again: the cheapest choice within a budget."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from zbcompile.passes.recompute.saved_values import (
    Candidates,
    fewest_bytes,
    least_cost_within,
    lowest_cost,
)


def test_a_budget_is_met_at_the_lowest_cost() -> None:
    """Three layers of 10 bytes behind an input of 1 byte, with a kept output each."""
    inputs = {"x": (), "a": ("x",), "b": ("a",), "c": ("b",)}
    sizes, cost = {"x": 1, "a": 10, "b": 10, "c": 10}, {"a": 5, "b": 5, "c": 5}
    candidates = Candidates(frozenset(inputs), inputs, sizes, cost)
    costs = {}
    for budget in (31, 30, 21, 20, 11, 1):
        saved = least_cost_within(candidates, budget)
        assert saved is not None
        costs[budget] = saved.cost
        assert saved.bytes <= budget
    assert costs == {31: 0, 30: 5, 21: 5, 20: 10, 11: 10, 1: 15}
    assert least_cost_within(candidates, 0) is None


def random_candidates(seed: int) -> Candidates:
    """Ten values, each computed from up to two earlier ones; some are not kept, others not made."""
    rng, values = random.Random(seed), range(10)
    unkept = {value for value in values if rng.random() < 0.2}
    return Candidates(
        backward_inputs=frozenset(rng.sample(values, 5)),
        inputs={v: tuple(rng.sample(range(v), min(v, rng.randint(0, 2)))) for v in values},
        bytes={value: rng.randint(1, 20) for value in values if value not in unkept},
        cost={v: rng.randint(0, 20) for v in values if v in unkept or rng.random() < 0.8},
    )


def every_choice(candidates: Candidates) -> Iterator[tuple[int, int]]:
    """Bytes and cost of every set of kept values from which the backward's can be made."""
    for flags in itertools.product((False, True), repeat=len(candidates.bytes)):
        saved = {value for value, flag in zip(candidates.bytes, flags, strict=True) if flag}
        remade: set[Any] = set()
        missing = [value for value in candidates.backward_inputs if value not in saved]
        while missing and missing[-1] in candidates.cost:
            value = missing.pop()
            new = () if value in remade else candidates.inputs[value]
            remade.add(value)
            missing += [argument for argument in new if argument not in saved]
        if not missing:
            yield sum(map(candidates.bytes.get, saved)), sum(map(candidates.cost.get, remade))


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_is_better(seed: int) -> None:
    """Within a budget: between the best choice and the best corner of the hull."""
    candidates = random_candidates(seed)
    choices = set(every_choice(candidates))
    few, cheap = fewest_bytes(candidates), lowest_cost(candidates)
    assert (few.bytes, few.cost) == min(choices)
    assert (cheap.cost, cheap.bytes) == min((cost, size) for size, cost in choices)
    weights = [(a, b) for a in range(1, 40, 2) for b in range(1, 40)]
    corners = {min(choices, key=lambda c, w=w: (w[0] * c[0] + w[1] * c[1], c)) for w in weights}
    for budget in range(few.bytes, cheap.bytes + 1):
        actual = least_cost_within(candidates, budget)
        assert actual is not None
        assert (actual.bytes, actual.cost) in choices
        assert actual.bytes <= budget
        assert actual.cost >= min(cost for size, cost in choices if size <= budget)
        assert actual.cost <= min(c for s, c in {*corners, min(choices)} if s <= budget)
    assert least_cost_within(candidates, few.bytes - 1) is None
