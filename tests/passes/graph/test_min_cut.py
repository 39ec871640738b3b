"""Minimum cuts against every cut there is, on small random networks."""

from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from tests.support.generated import examples
from zbcompile.passes.graph.min_cut import SINK, SOURCE, Network

INNER = range(5)
EDGES = st.tuples(
    st.sampled_from([SOURCE, *INNER]),
    st.sampled_from([*INNER, SINK]),
    st.one_of(st.none(), st.integers(0, 9)),
)


@pytest.mark.slow
@examples(200)
@given(st.lists(EDGES, max_size=16))
def test_the_smallest_of_the_cheapest_cuts(edges: list[tuple[object, object, int | None]]) -> None:
    network = Network()
    for edge in edges:
        network.connect(*edge)
    sides = [
        {SOURCE, *inner} for size in range(len(INNER) + 1) for inner in combinations(INNER, size)
    ]
    prices = [_price(edges, side) for side in sides]
    if min(prices) == float("inf"):
        with pytest.raises(ValueError, match="cannot be cut"):
            network.source_side()
        return
    cheapest = [side for side, price in zip(sides, prices, strict=True) if price == min(prices)]
    assert network.source_side() == set.intersection(*cheapest)


def _price(edges: list[tuple[object, object, int | None]], side: set[object]) -> float:
    across = [capacity for tail, head, capacity in edges if tail in side and head not in side]
    return sum(float("inf") if capacity is None else capacity for capacity in across)


def test_a_network_that_cannot_be_cut() -> None:
    network = Network()
    network.connect(SOURCE, "a")
    network.connect("a", SINK)
    with pytest.raises(ValueError, match="cannot be cut"):
        network.source_side()


def test_long_chains_need_no_recursion() -> None:
    network = Network()
    network.connect(SOURCE, 0, 5)
    for i in range(5000):
        network.connect(i, i + 1, 7 if i != 3000 else 2)
    network.connect(5000, SINK, 5)
    assert network.source_side() == {SOURCE, *range(3001)}
