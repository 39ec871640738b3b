"""The descent to a layout whose step is shortest: cuts are moved and stages recompute more or less as long as that
gains, and then again from neighbours of the best."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import inf
from random import Random

from zbcompile.passes.compile_options import Policy
from zbcompile.passes.errors import PartitionError
from zbcompile.program.choice import Layout
from zbcompile.schedules import ScheduleError

GAIN = 1e-3  # smaller gains are not worth stages that differ, which are compiled one by one
RESTARTS = 6
BOUNDED = 32  # moves whose bounds are compared,
LOOKED = 3  # of which at most this many are looked at

Score = tuple[float, float]  # bytes beyond the limit on the fullest rank, then the time of the step


@dataclass
class Descent:
    """Moves cuts between `places` and stages between `corners` until no move gains, or it is `over`. With corners, a
    layout says of each stage what it recomputes; they are in the order of what they keep.

    `look` finds the score of a layout; `bound`, if it is given, says quickly what no score of it can be below, and only
    what promises most is looked at. Both raise PartitionError or ScheduleError for a layout that does not fit.
    `settled` is a layout with what follows from its cuts.
    """

    places: Sequence[int]
    look: Callable[[Layout], Score]
    over: Callable[[], bool]
    bound: Callable[[Layout], Score] | None = None
    corners: Sequence[Policy] = ()
    settled: Callable[[Layout], Layout] = lambda layout: layout
    rounds: int = 1  # from far moves to near ones
    random: Random = field(default_factory=lambda: Random(0))

    def run(self, start: Layout) -> Layout:
        best = self._down(start)
        for _ in range(RESTARTS):
            if self.over():
                break
            found = self._down(self._shaken(best[1]))
            best = found if is_better(found[0], best[0]) else best
        return best[1]

    def _down(self, layout: Layout) -> tuple[Score, Layout]:
        score = _score(self.look, layout)
        for step in self.rounds * steps_of(layout.edges, len(self.places)):
            while (moved := self._gain(score, layout, step)) is not None:
                score, layout = moved
        return score, layout

    def _gain(self, score: Score, layout: Layout, step: int) -> tuple[Score, Layout] | None:
        """A move by `step` places that gains; None if none does."""
        for moved in self._promising(score, self._moves(layout, step)):
            if is_better(found := _score(self.look, moved), score):
                return found, moved
        return None

    def _promising(self, score: Score, moves: Sequence[Layout]) -> Iterator[Layout]:
        """The moves, in any order or, if there are bounds, of some at a time the best."""
        for first in range(0, len(moves), BOUNDED if self.bound else 1):
            if self.over():
                return
            if self.bound is None:
                yield self.settled(moves[first])
                continue
            some = [(_score(self.bound, moved), moved) for moved in map(self.settled, moves[first : first + BOUNDED])]
            promising = sorted((each for each in some if is_better(each[0], score)), key=lambda each: each[0])
            yield from (moved for _, moved in promising[:LOOKED])

    def _moves(self, layout: Layout, step: int) -> list[Layout]:
        cuts = [self.places.index(edge) for edge in layout.edges]
        found = [replace(layout, edges=self._edges(moved)) for moved in moves_of(cuts, len(self.places), step)]
        policies = layout.recompute if self.corners and isinstance(layout.recompute, tuple) else ()
        for stage, now in enumerate(policies):
            at = self.corners.index(now) if now in self.corners else 0
            for other in {max(0, at - step), min(at + step, len(self.corners) - 1)} - {at}:
                policy = self.corners[other]
                found.append(replace(layout, recompute=(*policies[:stage], policy, *policies[stage + 1 :])))
        self.random.shuffle(found)
        return found

    def _shaken(self, layout: Layout) -> Layout:
        """Every cut somewhere near where it was, and half of the stages with any corner."""
        cuts, count = [self.places.index(edge) for edge in layout.edges], len(self.places)
        reach = max(1, count // (2 * len(cuts) + 2))
        moved = sorted({min(max(0, cut + self.random.randint(-reach, reach)), count - 1) for cut in cuts})
        edges = self._edges(moved) if len(moved) == len(cuts) else layout.edges
        recompute = layout.recompute
        if self.corners and isinstance(recompute, tuple):
            recompute = tuple(self.random.choice((each, self.random.choice(self.corners))) for each in recompute)
        return self.settled(replace(layout, edges=edges, recompute=recompute))

    def _edges(self, cuts: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.places[cut] for cut in cuts)


def _score(find: Callable[[Layout], Score], layout: Layout) -> Score:
    """What is found; infinite for a layout that does not fit."""
    with suppress(PartitionError, ScheduleError):
        return find(layout)
    return inf, inf


def is_better(new: Score, old: Score) -> bool:
    return new[0] < old[0] or (new[0] == old[0] and new[1] < old[1] * (1 - GAIN))


def steps_of(cuts: Sequence[int], count: int) -> list[int]:
    """How far cuts are moved at once, in places, given their number: at most by the length of a stage."""
    return [1 << power for power in reversed(range(max(1, (count // (len(cuts) + 1)).bit_length())))]


def moves_of(cuts: Sequence[int], count: int, step: int) -> Iterator[list[int]]:
    """Cuts that give `step` places of any stage to any other; `cuts` are numbers of places."""
    for first, end in combinations(range(len(cuts) + 1), 2):
        for by in (step, -step):
            moved = [*cuts[:first], *(cut + by for cut in cuts[first:end]), *cuts[end:]]
            if all(a < b for a, b in pairwise([-1, *moved, count])):
                yield moved
