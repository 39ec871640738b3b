"""Save or recompute: which values the forward keeps for the backward, as a minimum cut.

Every value that the backward reads is either kept from the forward, at the cost of its bytes, or recomputed, at the
cost of its time, from values that are themselves kept or recomputed. For any weighing of bytes against time the best
choice is a minimum cut (Chen et al. 2016 pose the problem, arXiv:1604.06174; torch's partitioner solves the case of
bytes alone). A budget of bytes asks for the least time that fits, which is a knapsack. The cuts for all weighings are
the corners of the convex hull of what is possible; `fit` starts from the best corner that fits and branches from there.
`every_choice` in `tests/support/plain_versions.py` tries all choices, in ten lines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from zbcompile.passes.graph.min_cut import SINK, SOURCE, Network

_TIE = 10**9  # one part in a billion per node makes equal layers differ, so that a budget can treat them differently


@dataclass(frozen=True)
class Values:
    """The values of a forward, its nodes for example, and what they cost.

    `wanted` are those that the backward reads. `inputs[v]` are the values that recomputing v reads (without those that
    are always available), `bytes[v]` what keeping it takes (absent: it cannot be kept, being a view or a tuple),
    `time[v]` what recomputing it takes, in attoseconds (absent: it cannot be recomputed).
    """

    wanted: frozenset[Any]
    inputs: Mapping[Any, tuple[Any, ...]]
    bytes: Mapping[Any, int]
    time: Mapping[Any, int]


@dataclass(frozen=True)
class Saving:
    """A choice: the values kept and those recomputed, with the bytes and the time that this takes."""

    kept: frozenset[Any]
    remade: frozenset[Any]
    bytes: int
    time: int


@dataclass(frozen=True)
class Fit:
    """A choice for a budget, and the time (attoseconds) below which no choice that fits can be. `contested` are the
    values over which the choice and its neighbour on the hull, which does not fit, differ."""

    saving: Saving
    least_time: int
    contested: tuple[Any, ...] = ()


def smallest(values: Values) -> Saving:
    """The fewest bytes that can be kept, and among those choices the least time."""
    return _cut(values, 1 + sum(values.time.values()), 1)


def quickest(values: Values) -> Saving:
    """The least time (zero, except for what cannot be kept), and among those choices the fewest bytes."""
    return _cut(values, 1, 1 + sum(values.bytes.values()))


def fit(values: Values, budget: int, tries: int = 16, tolerance: float = 0.01) -> Fit | None:
    """The least time that keeps at most `budget` bytes; None if nothing fits.

    Branch and bound: if the best corner of the hull leaves a gap to its lower bound, a contested value is kept in one
    branch and recomputed in the other. The search ends with the optimum, within `tolerance` of it, or after `tries`
    branchings with the best found; `least_time` bounds how far off that can be.
    """
    root = _fit_on_hull(values, budget)
    if root is None:
        return None
    best, counter = root, count()
    open_branches = [(root.least_time, next(counter), values, root)]
    for _ in range(tries):
        if not open_branches or open_branches[0][0] >= best.saving.time * (1 - tolerance):
            break
        _, _, whole, found = heappop(open_branches)
        for part in _branches(whole, found):
            fitted = _fit_on_hull(part, budget)
            if fitted is not None:
                heappush(open_branches, (fitted.least_time, next(counter), part, fitted))
                best = min(best, fitted, key=lambda f: f.saving.time)
    least = min([best.saving.time, *(bound for bound, *_ in open_branches)])
    return Fit(best.saving, least)


def _branches(values: Values, found: Fit) -> list[Values]:
    """The same problem twice: with the largest contested value never recomputed, and with it never kept."""
    disputed = max((n for n in found.contested if n in values.bytes and n in values.time), key=values.bytes.__getitem__)
    never_remade = {node: time for node, time in values.time.items() if node is not disputed}
    never_kept = {node: size for node, size in values.bytes.items() if node is not disputed}
    return [replace(values, time=never_remade), replace(values, bytes=never_kept)]


def _fit_on_hull(values: Values, budget: int) -> Fit | None:
    """The best corner of the convex hull that fits."""
    over, under = _possible(quickest, values), _possible(smallest, values)
    if over is None or under is None or under.bytes > budget:
        return None
    if over.bytes <= budget:
        return Fit(over, over.time)
    uneven = replace(values, time={node: time * (_TIE + i) for i, (node, time) in enumerate(values.time.items())})
    over, under = _neighbours(uneven, budget)
    slope_up, slope_down = under.time - over.time, over.bytes - under.bytes
    least = under.time - slope_up * (budget - under.bytes) // slope_down
    contested = tuple(node for node in values.bytes if (node in over.kept) != (node in under.kept))
    best = replace(under, time=sum(values.time[node] for node in under.remade))
    return Fit(best, least // (_TIE + len(uneven.time)), contested)


def _neighbours(values: Values, budget: int) -> tuple[Saving, Saving]:
    """The corners of the hull on both sides of the budget. The line between them bounds every choice from below."""
    over, under = quickest(values), smallest(values)
    while True:
        of_bytes, of_time = under.time - over.time, over.bytes - under.bytes
        between = _cut(values, of_bytes, of_time)
        if of_bytes * between.bytes + of_time * between.time >= of_bytes * under.bytes + of_time * under.time:
            return over, under  # nothing lies below the line
        over, under = (over, between) if between.bytes <= budget else (between, under)


def _possible(choose: Callable[[Values], Saving], values: Values) -> Saving | None:
    try:
        return choose(values)
    except ValueError:  # some value that the backward reads can be neither kept nor recomputed
        return None


def _cut(values: Values, weight_of_bytes: int, weight_of_time: int) -> Saving:
    """The choice that minimises the weighted sum.

    Each value is two vertices: `make` is on the sink's side if it is recomputed, `have` if the backward needs it at
    all. Keeping it cuts the edge between the two.
    """
    network = Network()
    for node, inputs in values.inputs.items():
        size, time = values.bytes.get(node), values.time.get(node)
        network.connect(("make", node), ("have", node), None if size is None else weight_of_bytes * size)
        network.connect(SOURCE, ("make", node), None if time is None else weight_of_time * time)
        for argument in inputs:
            network.connect(("have", argument), ("make", node))
    for node in values.wanted:
        network.connect(("have", node), SINK)
    side = network.source_side()
    needed = [node for node in values.inputs if ("have", node) not in side]
    remade = frozenset(node for node in needed if ("make", node) not in side)
    kept = frozenset(needed) - remade
    return Saving(kept, remade, sum(values.bytes[n] for n in kept), sum(values.time[n] for n in remade))
