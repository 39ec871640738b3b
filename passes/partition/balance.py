"""Balance: exact minimisation of the heaviest stage (in a V, the heaviest rank) over a row of
loads.

Knows numbers only. The row is what the stages divide among themselves; it can be cut at `edges`
(given as the number of items before each). The first edge is the beginning and the last the end.
`cuts` are the chosen inner edges.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# in a V, the most of its rank's time that one chunk may take: uneven chunks stretch the warm-up
CHUNK_SHARE = 0.625
# unless the chunk is little more than one indivisible piece, such as a head and its loss
PIECE_SLACK = 1.25
COARSE = 1e-6  # bisection ends at this precision; better cuts are then found step by step
# stages of a V; with more, cuts that exist only around indivisible parts may be missed
THOROUGH = 32
SAME = 1e-9  # relative; smaller differences are rounding errors


@dataclass(frozen=True)
class LoadRow:
    """A row of items with loads, to be divided into stages. `totals[k]` is the load of the first k
    items, `ranks_of[stage]` the rank of a stage, `piece` the heaviest load that no cut can divide.
    """

    totals: Sequence[float]
    ranks_of: Sequence[int]
    piece: float = 0.0
    chunk_share: float = CHUNK_SHARE

    @property
    def stages(self) -> int:
        return len(self.ranks_of)

    @property
    def folded(self) -> bool:
        """A V: rank r holds stages r and 2p-1-r."""
        ranks = list(self.ranks_of)
        return len(ranks) == 2 * (max(ranks) + 1) > 2 and ranks == ranks[::-1]

    def stage_loads(self, cuts: Sequence[int]) -> tuple[float, ...]:
        return tuple(
            self.totals[b] - self.totals[a] for a, b in pairwise([0, *cuts, len(self.totals) - 1])
        )

    def rank_loads(self, cuts: Sequence[int]) -> tuple[float, ...]:
        loads = [0.0] * (max(self.ranks_of) + 1)
        for rank, load in zip(self.ranks_of, self.stage_loads(cuts), strict=True):
            loads[rank] += load
        return tuple(loads)

    def heaviest(self, cuts: Sequence[int]) -> float:
        """The load to be minimised: of the heaviest stage or, in a V, of the heaviest rank. There a
        chunk above CHUNK_SHARE of its rank counts as if its rank were full of such chunks, unless
        it is at most PIECE_SLACK times what cannot be divided."""
        chunk = max(self.stage_loads(cuts))
        if not self.folded:
            return chunk
        return max(
            *self.rank_loads(cuts),
            chunk / self.chunk_share if chunk > self.piece * PIECE_SLACK * (1 + SAME) else 0,
        )


def best_cuts(row: LoadRow, edges: Sequence[int]) -> tuple[float, list[int]] | None:
    """The least `row.heaviest` of all cuts at inner `edges`, and cuts that have it; None if there
    are too few edges."""
    if len(edges) <= row.stages:
        return None
    start = cuts = even_cuts(row, edges)
    high = row.heaviest(cuts)
    low = row.totals[-1] / row.stages
    while high - low > COARSE * high:
        middle = (low + high) / 2
        candidate = cuts_within(row, edges, middle)
        low, high, cuts = (
            (middle, high, cuts) if candidate is None else (low, row.heaviest(candidate), candidate)
        )
    while high > 0 and (better := cuts_within(row, edges, high * (1 - 4 * SAME))) is not None:
        high, cuts = row.heaviest(better), better
    if cuts is start:  # of all as light, those nearest to equal shares
        cuts = cuts_within(row, edges, high) or cuts
    return high, cuts


def even_cuts(row: LoadRow, edges: Sequence[int]) -> list[int]:
    """Returns cuts at inner `edges` near equal shares. There must be enough edges."""
    inner, chosen, last = edges[1:-1], [], -1
    for stage in range(1, row.stages):
        share = row.totals[-1] * stage / row.stages
        near = bisect_left(inner, share, key=lambda edge: row.totals[edge])
        last = min(max(near, last + 1), len(inner) - (row.stages - stage))
        chosen.append(inner[last])
    return chosen


def cuts_within(row: LoadRow, edges: Sequence[int], limit: float) -> list[int] | None:
    """Cuts at inner `edges` that leave nothing heavier than `limit`; None if there are none."""
    return _Vee(row, edges, limit).cuts() if row.folded else _straight_cuts(row, edges, limit)


def heaviest_piece(totals: Sequence[float], edges: Sequence[int]) -> float:
    """The heaviest load between two neighbouring edges."""
    return max(totals[b] - totals[a] for a, b in pairwise(edges))


def _straight_cuts(row: LoadRow, edges: Sequence[int], limit: float) -> list[int] | None:
    """Returns cuts that leave no stage heavier than `limit`; each is as near to an equal share as
    the earliest and latest possible places allow."""
    limit *= 1 + SAME
    at, last = [row.totals[edge] for edge in edges], len(edges) - 1
    earliest = [last]  # of every cut, from the last one
    for stage in range(row.stages - 1, -1, -1):
        begin = max(stage, bisect_left(at, at[earliest[-1]] - limit))
        if begin >= earliest[-1] or (stage == 0 and begin > 0):
            return None
        earliest.append(begin)
    cuts = [0]
    for stage, low in enumerate(earliest[-2:0:-1], start=1):
        high = min(bisect_right(at, at[cuts[-1]] + limit) - 1, last - (row.stages - stage))
        places = range(max(low, cuts[-1] + 1), high + 1)
        share = at[-1] * stage / row.stages
        cuts.append(min(places, key=lambda place: abs(at[place] - share)))
    return [edges[place] for place in cuts[1:]]


class _Outer(NamedTuple):
    """The outer ranks of a V cover the row up to edge `a` and from edge `b` on, cut at the pairs in
    `path`."""

    a: int
    b: int
    path: tuple[tuple[int, int], ...] = ()


class _Vee:
    """Rank by rank from the outside in, each with a chunk at both ends of what is left.

    Of two ways to begin, the one that leaves less is kept. It is at least as good, unless the part
    next to it is indivisible: such edges, and all edges if there are only a few, are kept as well.
    What leaves more than the inner ranks can carry cannot be part of a solution.
    """

    def __init__(self, row: LoadRow, edges: Sequence[int], limit: float) -> None:
        self.row, self.edges, self.limit = row, edges, limit * (1 + SAME)
        self.at = [row.totals[edge] for edge in edges]
        self.chunk = max(limit * row.chunk_share, row.piece * PIECE_SLACK) * (1 + SAME)
        self.few = len(edges) <= 4 * row.stages
        self.ranks = row.stages // 2
        self.thorough = False  # whether what looks worse is kept, too, because of indivisible parts

    def cuts(self) -> list[int] | None:
        if max(b - a for a, b in pairwise(self.at)) > self.limit:
            return None
        cuts = None if self.few else self._search()
        if cuts is None and (self.few or self.row.stages <= THOROUGH):
            self.thorough = True
            cuts = self._search()
        return cuts

    def _search(self) -> list[int] | None:
        states = [_Outer(0, len(self.at) - 1)]
        for rank in range(self.ranks - 1):
            states = self._next_rank(states, rank)
        for state in states:
            middle = self._middle(state)
            if middle is not None:
                chosen = (
                    [a for a, _ in state.path] + [middle] + [b for _, b in reversed(state.path)]
                )
                return [self.edges[i] for i in chosen]
        return None

    def _next_rank(self, states: list[_Outer], rank: int) -> list[_Outer]:
        """All ways worth keeping to give `rank` its two chunks."""
        candidates: dict[tuple[int, int], _Outer] = {}
        inner = self.ranks - 1 - rank
        for a, b, path in states:
            least = self.at[b] - inner * self.limit - self.chunk
            for a2 in range(bisect_left(self.at, least, lo=a + 1), b - 2 * inner):
                left = self.at[a2] - self.at[a]
                if left > min(self.limit, self.chunk):
                    break
                carried = self.at[a2] + inner * self.limit
                for b2 in self._ends(left, b, a2 + 2 * inner):
                    if self.at[b2] > carried:
                        break
                    if (a2, b2) not in candidates:
                        candidates[a2, b2] = _Outer(a2, b2, (*path, (a2, b2)))
        return self._worth_keeping(candidates)

    def _ends(self, load: float, b: int, first: int) -> range:
        """Returns the edges at which the right chunk of a rank may begin.

        It ends at `b`, and the left chunk has this `load`. The first possible edge is enough unless
        `few` or `_sticks` needs more.
        """
        capacity = min(self.limit - load, self.chunk)
        begin = max(first, bisect_left(self.at, self.at[b] - capacity, hi=b))
        end = begin + 1
        while end < b and (self.few or self._sticks(end - 1)):
            end += 1
        return range(begin, min(end, b))

    def _sticks(self, edge: int) -> bool:
        """Returns True if the part just before `edge` is heavier than `limit - chunk`."""
        return (
            self.thorough
            and edge > 0
            and self.at[edge] - self.at[edge - 1] > self.limit - self.chunk
        )

    def _worth_keeping(self, states_by_edges: dict[tuple[int, int], _Outer]) -> list[_Outer]:
        if self.few:
            return list(states_by_edges.values())
        states, least = [], len(self.at)
        for a, b in sorted(states_by_edges, key=lambda ab: (-ab[0], ab[1])):
            if b < least or self._sticks(least):
                states.append(states_by_edges[a, b])
                least = min(least, b)
        return states

    def _middle(self, state: _Outer) -> int | None:
        """The most even cut between the chunks of the innermost rank."""
        a, b = state.a, state.b
        if self.at[b] - self.at[a] > self.limit:
            return None
        half = (self.at[a] + self.at[b]) / 2
        for middle in sorted(range(a + 1, b), key=lambda j: abs(self.at[j] - half)):
            if max(self.at[middle] - self.at[a], self.at[b] - self.at[middle]) > self.chunk:
                return None
            return middle
        return None
