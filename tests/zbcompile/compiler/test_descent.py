"""Cuts, recomputation and order found together, on costs of layers alone: nothing is captured."""

from functools import cache
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, strategies as st

from tests.support.all_orders import AllOrders
from tests.support.generated import examples
from zbcompile.compiler.descent import GAIN, Descent, Score
from zbcompile.passes.compile_options import Choices, Policy, Recompute
from zbcompile.program.choice import Layout
from zbcompile.schedules import Costs, bound, search

RANKS, MICROBATCHES = 3, 6


def at(edges: tuple[int, ...], recompute: Recompute = "off") -> Layout:
    return Layout("linear", RANKS, MICROBATCHES, edges, recompute)


class Layers:
    """What whole layers of these times take, each of which keeps 1, within a limit of what a rank keeps."""

    def __init__(self, times: list[int], limit: float | None = None) -> None:
        self.times, self.limit, self.looked = times, limit, 0

    def task(self, layout: Layout) -> tuple[Costs, int, int]:
        totals, ends = [0, *accumulate(self.times)], [0, *layout.edges, len(self.times)]
        times = tuple(totals[b] - totals[a] for a, b in pairwise(ends))
        kept = tuple(b - a for a, b in pairwise(ends))
        return Costs(times, times, times, activation=kept), RANKS, MICROBATCHES

    def bound(self, layout: Layout) -> Score:
        return 0, bound(*self.task(layout), "linear", self.limit)

    def look(self, layout: Layout) -> Score:
        self.looked += 1
        return 0, search(*self.task(layout), self.limit, ["linear"], moves=0, seconds=60).objective

    def seconds(self, *edges: int) -> float:
        return self.look(at(edges))[1]

    def moved(self, *edges: int, over: bool = False) -> tuple[int, ...]:
        places = range(1, len(self.times))
        return Descent(places, self.look, lambda: over, self.bound, rounds=2).run(at(edges)).edges


def test_less_memory_wants_other_shares() -> None:
    """The first rank has most in flight: with fewer layers it keeps more microbatches within the same limit."""
    layers = Layers([1] * 12, limit=7.2)  # .6 of what 1F1B keeps
    moved = layers.moved(4, 8)
    assert layers.seconds(*moved) <= 0.93 * layers.seconds(4, 8)
    assert moved == layers.moved(4, 8)  # the same question has the same answer


@pytest.mark.slow
def test_even_layers_stay() -> None:
    assert Layers([1] * 9).moved(3, 6) == (3, 6)


@pytest.mark.slow
@examples(3)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=7), st.sampled_from([None, 4.0, 6.0]))
def test_never_longer(times: list[int], limit: float | None) -> None:
    layers = Layers(times, limit)
    assert layers.seconds(*layers.moved(1, 2)) <= layers.seconds(1, 2)


def test_nothing_is_moved_when_time_is_over() -> None:
    layers = Layers([1] * 12, limit=7.2)
    assert layers.moved(4, 8, over=True) == (4, 8)
    assert layers.looked == 1


CORNERS: tuple[Policy, ...] = ("off", 0.5, "full")
AGAIN, KEPT = {"off": 0, 0.5: 0.4, "full": 1}, {"off": 1, 0.5: 0.5, "full": 0.2}  # of a forward, of what it keeps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "times"),
    [
        (9.0, (4, 4, 4)),
        (6.0, (3, 4, 6)),
        *(
            pytest.param(*each, marks=pytest.mark.beyond_sample)
            for each in ((12.0, (4, 4, 5)), (5.0, (5, 4, 3)), (8.0, (3, 5, 4)))
        ),
    ],
)
def test_what_stages_recompute_is_what_brute_force_finds(limit: float, times: tuple[int, ...]) -> None:
    """3 ranks, 5 microbatches: no corners of the stages have any order that is shorter than what the search chose."""

    def costs_of(layout: Layout) -> Costs:
        policies = [Choices(recompute=layout.recompute).recompute_of(stage) for stage in range(3)]
        backward = tuple(t * (1 + AGAIN[each]) for t, each in zip(times, policies, strict=True))
        kept = tuple(t * KEPT[each] for t, each in zip(times, policies, strict=True))
        return Costs(times, backward, times, activation=kept, residue=(0.1,) * 3)

    @cache
    def look(layout: Layout) -> Score:
        return 0, search(costs_of(layout), 3, 5, limit, ["linear"], moves=600, seconds=600).objective

    chosen = Descent([1], look, lambda: False, corners=CORNERS).run(at((), ("full",) * 3))
    _, best = look(chosen)
    for corners in product(CORNERS, repeat=3):
        assert not AllOrders(costs_of(at((), corners)), 5, limit).is_any_shorter(best * (1 - GAIN))
    assert AllOrders(costs_of(chosen), 5, limit).is_any_shorter(best * (1 + GAIN))
    assert best < look(at((), ("full",) * 3))[1]
