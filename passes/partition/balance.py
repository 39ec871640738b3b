"""Balance: minimises the heaviest stage, in a V the heaviest rank, over a row of loads.

Knows numbers only. The row is what the stages divide among themselves; it can be cut at `edges`
(given as the number of items before each). The first edge is the beginning and the last the end.
`cuts` are the chosen inner edges.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# in a V, the most of its rank's time that one chunk may take: uneven chunks stretch the warm-up
CHUNK_SHARE = 0.625
# unless the chunk is little more than one indivisible piece, such as a head and its loss
PIECE_SLACK = 1.25
COARSE = 1e-6  # bisection ends at this precision; better cuts are then found step by step
SAME = 1e-9  # relative; smaller differences are rounding errors
Path = list[tuple[int, int]]


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
    low = high = row.totals[-1] / row.stages
    while (cuts := cuts_within(row, edges, high)) is None:
        low, high = high, high * 1.25
    high = row.heaviest(cuts)
    while high - low > COARSE * high:
        middle = (low + high) / 2
        candidate = cuts_within(row, edges, middle)
        low, high, cuts = (
            (middle, high, cuts) if candidate is None else (low, row.heaviest(candidate), candidate)
        )
    while high > 0 and (better := cuts_within(row, edges, high * (1 - 4 * SAME))) is not None:
        high, cuts = row.heaviest(better), better
    return high, cuts


def cuts_within(row: LoadRow, edges: Sequence[int], limit: float) -> list[int] | None:
    """Cuts at inner `edges` that leave nothing heavier than `limit`; None if there are none."""
    return (_folded_cuts if row.folded else _straight_cuts)(row, edges, limit)


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


def _folded_cuts(row: LoadRow, edges: Sequence[int], limit: float) -> list[int] | None:
    """Returns cuts of a V that leave no rank heavier than `limit`.

    Rank by rank from the outside in, each takes a chunk at both ends of what is left. Of two ways
    to begin, the one that leaves less is kept. It is at least as good, unless the part next to it
    is indivisible: such edges, and all edges if there are only a few, are kept as well. What leaves
    more than the inner ranks can carry is no solution.
    """
    chunk = max(limit * row.chunk_share, row.piece * PIECE_SLACK) * (1 + SAME)
    limit *= 1 + SAME
    at, ranks = [row.totals[edge] for edge in edges], row.stages // 2
    few = len(edges) <= 4 * row.stages

    def sticks(edge: int) -> bool:
        return few or (edge > 0 and at[edge] - at[edge - 1] > limit - chunk)

    # The outer ranks cover the row up to edge a and from edge b on, cut at a path of such pairs.
    states: dict[tuple[int, int], Path] = {(0, len(at) - 1): []}
    for inner in range(ranks - 1, 0, -1):
        following: dict[tuple[int, int], Path] = {}
        for (a, b), path in states.items():
            nearest = bisect_left(at, at[b] - inner * limit - chunk, lo=a + 1)
            for first in range(nearest, b - 2 * inner):
                left = at[first] - at[a]
                if left > min(limit, chunk):
                    break
                begin = bisect_left(at, at[b] - min(limit - left, chunk), hi=b)
                begin = max(begin, first + 2 * inner)
                end = begin + 1
                while end < b and sticks(end - 1):
                    end += 1
                for last in range(begin, min(end, b)):
                    if at[last] > at[first] + inner * limit:
                        break
                    following.setdefault((first, last), [*path, (first, last)])
        states, least = {}, len(at)
        for a, b in sorted(following, key=lambda pair: (-pair[0], pair[1])):
            if b < least or sticks(least):
                states[a, b], least = following[a, b], min(least, b)
    for (a, b), path in states.items():
        middle = min(range(a + 1, b), key=lambda place: abs(at[a] + at[b] - 2 * at[place]))
        if at[b] - at[a] <= limit and max(at[middle] - at[a], at[b] - at[middle]) <= chunk:
            places = [*(a for a, _ in path), middle, *(b for _, b in reversed(path))]
            return [edges[place] for place in places]
    return None
