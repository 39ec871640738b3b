"""Cuts for the shortest step: moved, from those that balance the ranks, as long as the simulated step gets shorter.

The heaviest rank is not all that counts: stages that are first to start and last to end, and ranks at their limit of
memory, want other shares.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.passes.partition.liveness import Line
from zbcompile.schedules import Schedule, peak_memory, simulate
from zbcompile.schedules.ir.actions import flatten

GAIN = 1e-3  # smaller gains are not worth stages that differ, which are compiled one by one
ACTIONS = 300_000  # to be simulated at most,
LONG = 2500  # more are judged by their first microbatches,
LEAST = 120  # but so many cuts are tried
RESTARTS = 6

Score = tuple[float, float]  # bytes beyond the limit on the fullest rank, then the time of the step


def cuts_for_makespan(
    costs: LineCosts,
    edges: Sequence[int],
    schedule: Schedule,
    memory: float | None = None,
    boundary: float | None = None,
    recompute: bool = False,
) -> list[int]:
    """Move `edges` to where the step of `schedule` is shortest and no rank holds more than `memory` bytes; a cut that
    more than `boundary` bytes cross is not taken."""
    many = sum(map(len, schedule.orders)) > LONG
    places = places_of(costs.line, boundary)
    step = first_microbatches(schedule, 2 * schedule.ranks) if many else schedule

    def score(tried: Sequence[int]) -> Score:
        return score_of(costs, tried, step, memory, recompute, schedule.microbatches - step.microbatches)

    if not edges:
        return []
    left = max(LEAST, ACTIONS // sum(map(len, step.orders)))
    return _Descent(sorted({*places, *edges}), score, left).run(edges)


def places_of(line: Line, boundary: float | None = None) -> list[int]:
    """Where the line may be cut, as numbers of nodes before, and no more than `boundary` bytes cross."""
    edges = [position + 1 for position, allowed in enumerate(line.allowed[:-1]) if allowed]
    return [edge for edge in edges if boundary is None or line.boundary_bytes(edge - 1) <= boundary]


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The same order of fewer microbatches, which fill the pipeline, work and drain it as all do; the schedule itself
    if it has no more, or two copies of the model."""
    if schedule.microbatches <= count or schedule.placement.kind == "dual":
        return schedule
    orders = tuple(tuple(a for a in flatten(order) if a.microbatch < count) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders)


def score_of(
    costs: LineCosts,
    edges: Sequence[int],
    schedule: Schedule,
    memory: float | None,
    recompute: bool = False,
    more: int = 0,
) -> Score:
    """What the model cut at `edges` lacks in memory on its fullest rank, and the time of its step with so many `more`
    microbatches, for each of which the busiest rank takes as long as it works on one."""
    found = costs.costs(edges, recompute=recompute)
    beyond = 0.0
    if memory is not None:
        held = zip(peak_memory(schedule, found), costs.resident(edges, schedule.placement), strict=True)
        beyond = max(0.0, max(waiting + resident for waiting, resident in held) - memory)
    timeline = simulate(schedule, found)
    return beyond, float(timeline.makespan + more * timeline.work / schedule.microbatches)


class _Descent:
    """Moves cuts between `places` as long as that gains, and then from neighbours of the best cuts again."""

    def __init__(self, places: list[int], score: Callable[[Sequence[int]], Score], left: int) -> None:
        self.places, self.score, self.left = places, score, left
        self.random = Random(0)

    def run(self, edges: Sequence[int]) -> list[int]:
        best, cuts = self._down([self.places.index(edge) for edge in edges])
        for _ in range(RESTARTS):
            if self.left <= 0:
                break
            found, moved = self._down(shaken(cuts, len(self.places), self.random))
            if _is_better(found, best):
                best, cuts = found, moved
        return [self.places[cut] for cut in cuts]

    def _down(self, cuts: list[int]) -> tuple[Score, list[int]]:
        """Any move that gains, far ones first, until none does or too much was tried."""
        best, count = self._score(cuts), len(self.places)
        for step in steps_of(cuts, count):
            moves = shuffled_moves(cuts, count, step, self.random)
            while self.left > 0 and moves:
                moved = moves.pop()
                found = self._score(moved)
                if _is_better(found, best):
                    best, cuts, moves = found, moved, shuffled_moves(moved, count, step, self.random)
        return best, cuts

    def _score(self, cuts: Sequence[int]) -> Score:
        self.left -= 1
        return self.score([self.places[cut] for cut in cuts])


def shaken(cuts: Sequence[int], count: int, random: Random) -> list[int]:
    """Every cut somewhere near where it was; `cuts` are numbers of places, of which there are so many."""
    reach = max(1, count // (2 * len(cuts) + 2))
    moved = sorted({min(max(0, cut + random.randint(-reach, reach)), count - 1) for cut in cuts})
    return moved if len(moved) == len(cuts) else list(cuts)


def steps_of(cuts: Sequence[int], count: int) -> list[int]:
    """How far cuts are moved at once, in places, of which there are so many: up to as far as a stage is long."""
    return [1 << power for power in reversed(range(max(1, (count // (len(cuts) + 1)).bit_length())))]


def shuffled_moves(cuts: Sequence[int], count: int, step: int, random: Random) -> list[list[int]]:
    """Cuts that give `step` places of any stage to any other, in any order; `cuts` are numbers of places."""
    found = []
    for first, end in combinations(range(len(cuts) + 1), 2):
        for by in (step, -step):
            moved = [*cuts[:first], *(cut + by for cut in cuts[first:end]), *cuts[end:]]
            if all(a < b for a, b in pairwise([-1, *moved, count])):
                found.append(moved)
    random.shuffle(found)
    return found


def _is_better(new: Score, old: Score) -> bool:
    return new[0] < old[0] or (new[0] == old[0] and new[1] < old[1] * (1 - GAIN))
