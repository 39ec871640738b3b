# pyright: reportArgumentType=false
# Fractions stand for floats: they stay exact.

from fractions import Fraction

import pytest

from zbcompile.schedules import Costs, Link, ScheduleError


def test_uniform_has_the_documented_defaults() -> None:
    costs = Costs.uniform(3)
    assert costs.forward == costs.backward == costs.weight == costs.activation == (1, 1, 1)
    assert costs.residue == costs.activation
    assert costs.comm == 0
    third = Fraction(1, 3)  # stays exact
    assert Costs.uniform(2, third, third, third).times("BW") == (2 * third,) * 2


def test_a_link_overrides_the_common_hop() -> None:
    link = Link(0, 1, latency=5)
    costs = Costs((1, 1), (1, 1), (1, 1), message=(6, 6), comm=1, bandwidth=3, links=(link,))
    assert (costs.hop(0, 0, 1), costs.hop(0, 1, 0), costs.hop(0, 1, 1)) == (5, 1 + 6 / 3, 0)


def test_json_round_trip() -> None:
    links = (Link(0, 1, 1, 2.0),)
    costs = Costs((1, 2), (3, 4), (5, 0), activation=(0.5, 1), comm=0.1, links=links)
    assert Costs.from_json(costs.to_json()) == costs


def test_resizing_keeps_the_model() -> None:
    costs = Costs((1, 2, 3, 4), (1, 1, 1, 1), (0, 0, 1, 1), message=(7, 8, 9, 10))
    merged = costs.resized(2)
    assert (merged.forward, merged.weight, merged.message) == ((3, 7), (0, 2), (8, 10))
    assert sum(costs.resized(8).forward) == sum(costs.forward)
    with pytest.raises(ScheduleError, match="do not fit 3"):
        costs.resized(3)


READ = [
    ("{", "invalid JSON"),
    ("[]", "expected an object"),
    ('{"forward": [1]}', "missing backward, weight"),
    ('{"forward": [1], "backward": [1], "weight": [1], "wait": 1}', "unknown wait"),
    ('{"forward": 1, "backward": [1], "weight": [1]}', "forward=1; expected a list"),
    ('{"forward": ["a"], "backward": [1], "weight": [1]}', "finite number"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs((1, 2), (1,), (1, 2)), "`backward` has 1 entries, `forward` has 2"),
        (lambda: Costs.uniform(2, forward=-1), r"forward\[0\]=-1; expected a finite number, 0 or"),
        (lambda: Costs.uniform(2, forward=float("nan")), "finite"),
        (lambda: Costs.uniform(0), "`forward` is empty"),
        (lambda: Costs((1,), (1,), (1,), bandwidth=0), "bandwidth"),
        (lambda: Costs.uniform(1).time("SEND_F", 0), "'SEND_F' has no time"),
        *((lambda text=text: Costs.from_json(text), message) for text, message in READ),
    ],
)
def test_wrong_costs_are_refused_by_name(make, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()
