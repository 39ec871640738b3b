"""Cuts and order together: cuts are moved to where the best order that is found for them is shortest.

An order suits the cuts that it was found for, so for one that stays as it is moved cuts gain little. A search for all
cuts that might be better would take long: those are looked at whose bound promises most, the others never.
"""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random

from zbcompile.compiler.cut_planning import GAIN, RESTARTS, shaken, shuffled_moves, steps_of

Edges = tuple[int, ...]
ROUNDS = 2  # from far moves to near ones
BOUNDED = 32  # moves whose bounds are compared
LOOKED = 3  # of which so many at most are looked at


def cuts_with_orders(
    edges: Sequence[int],
    places: Sequence[int],
    bound: Callable[[Edges], float],
    look: Callable[[Edges], float],
    over: Callable[[], bool],
) -> Edges:
    """Move `edges` between `places` as long as a step gets shorter, or until it is `over`.

    `look` finds an order for cuts and says how long its step takes, `bound` what no order for them can be shorter than;
    both are infinite for cuts that hold too much.
    """
    places, random = sorted({*places, *edges}), Random(0)
    bound, look = cache(bound), cache(look)

    def at(cuts: Sequence[int]) -> Edges:
        return tuple(places[cut] for cut in cuts)

    def better(cuts: Sequence[int], step: int) -> Sequence[int] | None:
        """Of the moves of so many places some that gains, if any does."""
        moves, enough = shuffled_moves(cuts, len(places), step, random), look(at(cuts)) * (1 - GAIN)
        for first in range(0, len(moves), BOUNDED):
            if over():
                break
            some = ((bound(at(moved)), moved) for moved in moves[first : first + BOUNDED])
            for _, moved in sorted(each for each in some if each[0] < enough)[:LOOKED]:
                if look(at(moved)) < enough:
                    return moved
        return None

    def down(cuts: Sequence[int]) -> Sequence[int]:
        for step in ROUNDS * steps_of(cuts, len(places)):
            while (moved := better(cuts, step)) is not None:
                cuts = moved
        return cuts

    best = down([places.index(edge) for edge in edges])
    for _ in range(RESTARTS):
        if not over():
            best = min(best, down(shaken(best, len(places), random)), key=lambda cuts: look(at(cuts)))
    return at(best)
