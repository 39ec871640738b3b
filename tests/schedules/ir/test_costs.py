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


def test_the_fused_backward_costs_both_halves() -> None:
    assert Costs.uniform(2, backward=3, weight=2).times("BW") == (5, 5)


def test_a_link_overrides_the_common_hop() -> None:
    costs = Costs(
        (1, 1), (1, 1), (1, 1), message=(6, 6), comm=1, bandwidth=3, links=(Link(0, 1, latency=5),)
    )
    assert costs.hop(0, 0, 1) == 5
    assert costs.hop(0, 1, 0) == 1 + 6 / 3
    assert costs.hop(0, 1, 1) == 0


@pytest.mark.parametrize(("exchange", "time"), [(0, 7), (2, 5), (1, 6)])
def test_a_pair_hides_what_its_forward_exchanges(exchange: float, time: float) -> None:
    costs = Costs((2, 2), (3, 3), (2, 2), forward_exchange=(exchange,) * 2)
    assert costs.pair_time("F", 0, "BW", 1) == time


def test_json_round_trip() -> None:
    costs = Costs((1, 2), (3, 4), (5, 0), (1, 1), (0.5, 1), comm=0.1, links=(Link(0, 1, 1, 2.0),))
    assert Costs.from_json(costs.to_json()) == costs


def test_resizing_keeps_the_model() -> None:
    costs = Costs((1, 2, 3, 4), (1, 1, 1, 1), (0, 0, 1, 1), message=(7, 8, 9, 10))
    merged = costs.resized(2)
    assert (merged.forward, merged.weight, merged.message) == ((3, 7), (0, 2), (8, 10))
    assert sum(costs.resized(8).forward) == sum(costs.forward)
    assert costs.resized(4) is costs
    with pytest.raises(ScheduleError, match="do not fit 3"):
        costs.resized(3)


def test_fractions_stay_exact() -> None:
    third = Fraction(1, 3)
    assert Costs.uniform(2, third, third, third).times("BW") == (2 * third,) * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs((1, 2), (1,), (1, 2)), "`backward` has 1 entries, `forward` has 2"),
        (
            lambda: Costs.uniform(2, forward=-1),
            r"forward\[0\]=-1; expected a finite number, 0 or more",
        ),
        (lambda: Costs.uniform(2, forward=float("nan")), "finite"),
        (lambda: Costs.uniform(0), "`forward` is empty"),
        (lambda: Costs((1,), (1,), (1,), bandwidth=0), "bandwidth"),
        (lambda: Costs.from_json("{"), "invalid JSON"),
        (lambda: Costs.from_json("[]"), "expected an object"),
        (lambda: Costs.from_json('{"forward": [1]}'), "missing backward, weight"),
        (
            lambda: Costs.from_json('{"forward": [1], "backward": [1], "weight": [1], "wait": 1}'),
            "unknown wait",
        ),
        (
            lambda: Costs.from_json('{"forward": 1, "backward": [1], "weight": [1]}'),
            "forward=1; expected a list",
        ),
        (
            lambda: Costs.from_json('{"forward": ["a"], "backward": [1], "weight": [1]}'),
            "finite number",
        ),
        (lambda: Costs.uniform(1).time("SEND_F", 0), "'SEND_F' has no time"),
    ],
)
def test_wrong_costs_are_refused_by_name(make, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()
