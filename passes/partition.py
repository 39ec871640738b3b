"""Partition: where to cut the line so that the heaviest rank is as light as possible and the cuts are thin.

A linear or looped placement balances stages. In a V, rank r holds stages r and 2p-1-r, so RANKS are balanced: with the
embedding and the head both on rank 0, two light chunks beat one balanced and one heavy one.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from zbcompile.passes.costs import Machine, bytes_moved, machine_for, tensors_of
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.liveness import Line

TOLERANCE = 1.05  # thinner cuts are worth up to this factor over the best balance that any cuts reach
CHUNK_SHARE = 0.625  # in a V, the most of its rank's time that one chunk may take: uneven chunks stretch the warm-up


@dataclass(frozen=True)
class Cuts:
    """`after[i]` is the index in the line of the last node of stage i (the last stage ends the line).

    `seconds[stage]` is the nominal time of its forward and backward, `loads[rank]` the sum over the rank's stages,
    `imbalance` the heaviest rank over the mean rank.
    """

    after: tuple[int, ...]
    seconds: tuple[float, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def stage_of(self, index: int) -> int:
        """The stage of the line's node at `index`."""
        return bisect_left(self.after, index)


def choose_cuts(line: Line, stages: int, ranks_of: Sequence[int]) -> Cuts:
    """Cut `line` into `stages`; `ranks_of[stage]` is the rank that each will live on.

    Among all cuts within TOLERANCE of the best balance, takes the one whose widest boundary carries the fewest bytes.
    Raises PartitionError when there are fewer places to cut than stages need.
    """
    totals = _running_totals(line)
    places = [i for i, allowed in enumerate(line.allowed) if allowed]
    if len(places) < stages - 1:
        raise PartitionError(
            f"the model can be cut in {len(places)} places, so into at most {len(places) + 1} stages; the schedule "
            f"needs {stages}. Use fewer ranks or chunks, or a deeper model."
        )
    if stages == 1:
        return _cuts([], totals, ranks_of)
    solve = _solver(totals, stages, ranks_of)
    best, _ = solve(places)
    width = {i: line.boundary_bytes(i) for i in places}
    for cap in sorted(set(width.values())):
        thin = [i for i in places if width[i] <= cap]
        if len(thin) < stages - 1:
            continue
        heaviest, after = solve(thin)
        if heaviest <= best * TOLERANCE:
            return _cuts(_thinner(after, totals, ranks_of, width, best * TOLERANCE), totals, ranks_of)
    raise AssertionError("the widest cap admits every place")


def _thinner(
    after: list[int], totals: list[float], ranks_of: Sequence[int], width: Mapping[int, int], limit: float
) -> list[int]:
    """Move each cut to the thinnest place between its neighbours that keeps every rank (every stage) within `limit`."""
    cuts = list(after)
    for k in range(len(cuts)):
        low, high = (cuts[k - 1] if k else -1), (cuts[k + 1] if k + 1 < len(cuts) else len(totals) - 1)
        narrower = [i for i in width if low < i < high and width[i] < width[cuts[k]]]
        for place in sorted(narrower, key=lambda i: (width[i], abs(totals[i + 1] - totals[cuts[k] + 1]))):
            moved = [*cuts[:k], place, *cuts[k + 1 :]]
            if _heaviest(moved, totals, ranks_of) <= limit:
                cuts = moved
                break
    return cuts


def _heaviest(after: list[int], totals: list[float], ranks_of: Sequence[int]) -> float:
    """What the solver minimised: the heaviest rank of a V, the heaviest stage elsewhere."""
    cuts = _cuts(after, totals, ranks_of)
    return max(cuts.loads) if _is_folded(ranks_of) else max(cuts.seconds)


def _running_totals(line: Line) -> list[float]:
    """Nominal seconds of the line up to and including each node, forward and backward."""
    machine = _machine(line)
    totals = [0.0]
    for node in line.nodes:
        forward = line.flops.get(node, 0) / machine.flops_per_second + bytes_moved(node) / machine.bytes_per_second
        totals.append(totals[-1] + forward * (3 if node.meta["differentiable"] else 1))
    return totals


def _machine(line: Line) -> Machine:
    devices = [t.device.type for node in line.nodes for t in tensors_of(node.meta["val"])]
    return machine_for(devices[0] if devices else "cpu")


def _cuts(after: list[int], totals: list[float], ranks_of: Sequence[int]) -> Cuts:
    edges = [0, *(i + 1 for i in after), len(totals) - 1]
    seconds = tuple(totals[b] - totals[a] for a, b in pairwise(edges))
    loads = [0.0] * (max(ranks_of) + 1)
    for stage, time in enumerate(seconds):
        loads[ranks_of[stage]] += time
    return Cuts(tuple(after), seconds, tuple(loads))


Solver = Callable[[list[int]], tuple[float, list[int]]]


def _is_folded(ranks_of: Sequence[int]) -> bool:
    return len(ranks_of) == 2 * (max(ranks_of) + 1) > 2 and list(ranks_of) == list(reversed(ranks_of))


def _solver(totals: list[float], stages: int, ranks_of: Sequence[int]) -> Solver:
    balance = _balance_folded if _is_folded(ranks_of) else _balance_line
    return lambda places: balance(totals, places, stages)


def _balance_line(totals: list[float], places: list[int], stages: int) -> tuple[float, list[int]]:
    """Minimise the heaviest stage: dynamic programming over the ends, best[k][j] = first k stages end at places[j]."""
    at = [totals[i + 1] for i in places]
    best, choice = list(at), []
    for _ in range(1, stages - 1):
        best, chosen = _one_more_stage(best, at)
        choice.append(chosen)
    if stages == 1:
        return totals[-1], []
    final = [max(b, totals[-1] - x) for b, x in zip(best, at, strict=True)]
    j = min(range(len(final)), key=final.__getitem__)
    heaviest, picked = final[j], [j]
    for chosen in reversed(choice):
        picked.append(chosen[picked[-1]])
    return heaviest, [places[j] for j in reversed(picked)]


def _one_more_stage(best: list[float], at: list[float]) -> tuple[list[float], list[int]]:
    out, chosen = [], []
    for j, end in enumerate(at):
        options = ((max(best[i], end - at[i]), i) for i in range(j))
        heaviest, i = min(options, default=(float("inf"), -1))
        out.append(heaviest)
        chosen.append(i)
    return out, chosen


def _balance_folded(totals: list[float], places: list[int], stages: int) -> tuple[float, list[int]]:
    """Minimise the heaviest rank of a V by bisection over the limit that no rank exceeds."""
    low, high = totals[-1] / (stages // 2), 2 * totals[-1]
    answer = _fold(totals, places, stages, high)
    if answer is None:
        raise PartitionError(f"no {stages} stages of a V placement fit {len(places)} places to cut.")
    while high - low > 1e-4 * totals[-1]:
        middle = (low + high) / 2
        found = _fold(totals, places, stages, middle)
        low, high, answer = (middle, high, answer) if found is None else (low, middle, found)
    return high, answer


class _Outer(NamedTuple):
    """The outer ranks of a V cover the line up to place `a` and from place `b` on, cut at the pairs in `path`."""

    a: int
    b: int
    path: tuple[tuple[int, int], ...] = ()


def _fold(totals: list[float], places: list[int], stages: int, limit: float) -> list[int] | None:
    """Cuts of a V in which no rank exceeds `limit` and no chunk much more than half of it, or None.

    For a given `a` the smallest `b` is best, so each rank keeps one state per reachable `a`, outermost rank first.
    """
    at = [0.0, *(totals[i + 1] for i in places), totals[-1]]
    states = [_Outer(0, len(at) - 1)]
    for inner in range(stages // 2 - 1, 0, -1):
        states = _next_rank(at, states, limit, inner)
    for a, b, path in states:
        middle = min(range(a + 1, b), key=lambda j: abs(at[j] - (at[a] + at[b]) / 2), default=None)
        if middle is not None and _fits(at[middle] - at[a], at[b] - at[middle], limit):
            chosen = [a for a, _ in path] + [middle] + [b for _, b in reversed(path)]
            return [places[j - 1] for j in chosen]
    return None


def _next_rank(at: list[float], states: list[_Outer], limit: float, inner: int) -> list[_Outer]:
    """Give the next rank a chunk at each end, leaving places for the `inner` ranks inside it."""
    best: dict[int, _Outer] = {}
    for a, b, path in states:
        for a2 in range(a + 1, b):
            left = at[a2] - at[a]
            if left > limit * CHUNK_SHARE:
                break
            room = min(limit - left, limit * CHUNK_SHARE)
            b2 = max(a2 + 2 * inner, bisect_left(at, at[b] - room))
            if b2 < b and (a2 not in best or b2 < best[a2].b):
                best[a2] = _Outer(a2, b2, (*path, (a2, b2)))
    return list(best.values())


def _fits(left: float, right: float, limit: float) -> bool:
    return left + right <= limit and max(left, right) <= limit * CHUNK_SHARE
