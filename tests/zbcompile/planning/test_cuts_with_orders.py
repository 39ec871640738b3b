"""Cuts and order found together, on costs of layers alone: nothing is captured."""

from itertools import accumulate, pairwise

from hypothesis import given, settings, strategies as st

from zbcompile.planning.cuts_with_orders import cuts_with_orders
from zbcompile.schedules import Costs, ScheduleError, bound, search

RANKS, MICROBATCHES = 3, 6
Edges = tuple[int, ...]


class Layers:
    """What whole layers of these times take, each of which keeps 1, within a limit of what a rank keeps."""

    def __init__(self, times: list[int], limit: float | None = None) -> None:
        self.times, self.limit, self.looked = times, limit, 0

    def task(self, edges: Edges) -> tuple[Costs, int, int]:
        totals, ends = [0, *accumulate(self.times)], [0, *edges, len(self.times)]
        times = tuple(totals[b] - totals[a] for a, b in pairwise(ends))
        kept = tuple(b - a for a, b in pairwise(ends))
        return Costs(times, times, times, activation=kept), RANKS, MICROBATCHES

    def bound(self, edges: Edges) -> float:
        try:
            return bound(*self.task(edges), "linear", self.limit)
        except ScheduleError:
            return float("inf")

    def look(self, edges: Edges) -> float:
        self.looked += 1
        try:
            return search(*self.task(edges), self.limit, ["linear"], moves=0, seconds=60).objective
        except ScheduleError:
            return float("inf")

    def moved(self, edges: Edges) -> Edges:
        places = range(1, len(self.times))
        return cuts_with_orders(edges, places, self.bound, self.look, lambda: False)


def test_less_memory_wants_other_shares() -> None:
    """The first rank has most in flight: with fewer layers it keeps more microbatches within the same limit."""
    layers = Layers([1] * 12, limit=7.2)  # .6 of what 1F1B keeps
    moved = layers.moved((4, 8))
    assert layers.look(moved) <= 0.93 * layers.look((4, 8))
    assert moved == layers.moved((4, 8))  # the same question has the same answer


def test_even_layers_stay() -> None:
    assert Layers([1] * 9).moved((3, 6)) == (3, 6)


@settings(max_examples=5)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=7), st.sampled_from([None, 4.0, 6.0]))
def test_never_longer(times: list[int], limit: float | None) -> None:
    layers = Layers(times, limit)
    assert layers.look(layers.moved((1, 2))) <= layers.look((1, 2))


def test_nothing_is_moved_when_time_is_over() -> None:
    layers = Layers([1] * 12, limit=7.2)
    assert cuts_with_orders((4, 8), range(1, 12), layers.bound, layers.look, lambda: True) == (4, 8)
    assert layers.looked == 1
