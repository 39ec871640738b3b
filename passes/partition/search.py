"""Partition: where to cut the line so that the heaviest rank is as light as possible and the cuts are thin.

A linear or looped placement balances stages. In a V, rank r holds stages r and 2p-1-r, so RANKS are balanced: with the
embedding and the head both on rank 0, two light chunks beat one balanced and one heavy one.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import LoadRow, best_cuts, cuts_within, heaviest_piece
from zbcompile.passes.partition.liveness import Line

THINNER = 1.05  # thinner cuts are worth up to this factor over the best balance that any cuts reach
ALIKE = 1.01  # cuts at the same place of repeated layers are worth up to this factor over the best at that width


@dataclass(frozen=True)
class Cuts:
    """`after[i]` is the index in the line of the last node of stage i (the last stage ends the line), `names[i]` the
    name of that node. `loads[stage]` is what a stage weighs, `rank_loads[rank]` the sum over the rank's stages, both in
    `unit`; `boundary[i]` the bytes that cross the cut behind stage i in one microbatch. `overweight` says in words what
    keeps the loads from being even; empty if they are.
    """

    after: tuple[int, ...]
    names: tuple[str, ...]
    basis: str
    unit: str
    loads: tuple[float, ...]
    rank_loads: tuple[float, ...]
    boundary: tuple[int, ...]
    overweight: str = ""

    def stage_of(self, index: int) -> int:
        """The stage of the line's node at `index`."""
        return bisect_left(self.after, index)


def choose_edges(line: Line, totals: Sequence[float], ranks_of: Sequence[int]) -> list[int]:
    """Choose the cuts of `line`, as numbers of nodes before each; `ranks_of[stage]` is the rank that each will live on,
    `totals[k]` the load of the first k nodes.

    Among all cuts within THINNER of the best balance, takes those whose widest boundary carries the fewest bytes, and
    of these, as long as they are within ALIKE, cuts at the same place of repeated layers: equal stages compile once.
    Raises PartitionError if the line has too few places for cuts.
    """
    if len(ranks_of) == 1:
        return []
    places = [i + 1 for i, allowed in enumerate(line.allowed[:-1]) if allowed]
    piece = heaviest_piece(totals, [0, *places, len(line.nodes)])
    search = _CutSearch(line, places, LoadRow(totals, ranks_of, piece))
    _require_places(search)
    edges = search.places
    best = best_cuts(search.row, search.framed(edges))
    assert best is not None, "there are enough places"
    limit = best[0] * THINNER
    edges = search.thinnest(edges, limit)
    return search.thinned(search.alike(edges, limit), edges, limit)


def describe_cuts(
    line: Line, edges: Sequence[int], totals: Sequence[float], ranks_of: Sequence[int], basis: str, unit: str
) -> Cuts:
    """The cuts at `edges` (numbers of nodes before each), with the loads of stages and ranks, in `unit`."""
    row = LoadRow(totals, ranks_of)
    after = tuple(edge - 1 for edge in edges)
    return Cuts(
        after=after,
        names=tuple(line.nodes[i].name for i in after),
        basis=basis,
        unit=unit,
        loads=row.stage_loads(edges),
        rank_loads=row.rank_loads(edges),
        boundary=tuple(line.boundary_bytes(i) for i in after),
    )


class _CutSearch:
    """The places where a line may be cut, and the search among them."""

    def __init__(self, line: Line, places: list[int], row: LoadRow) -> None:
        self.line, self.row, self.places = line, row, places
        self.width = {edge: line.boundary_bytes(edge - 1) for edge in places}

    def framed(self, edges: list[int]) -> list[int]:
        """The edges with the beginning and the end of the line."""
        return [0, *edges, len(self.line.nodes)]

    def thinnest(self, edges: list[int], limit: float) -> list[int]:
        """The edges of the smallest boundary width that admits cuts within `limit`, as any larger width does."""
        widths = sorted({self.width[edge] for edge in edges})

        def admits(width: int) -> bool:
            return cuts_within(self.row, self.framed(self._within(edges, width)), limit) is not None

        return self._within(edges, widths[bisect_left(widths, True, hi=len(widths) - 1, key=admits)])

    def _within(self, edges: list[int], width: int) -> list[int]:
        return [edge for edge in edges if self.width[edge] <= width]

    def alike(self, edges: list[int], limit: float) -> list[int]:
        """The best cuts at `edges`, or at the same place of repeated layers if nearly as good and within `limit`."""
        best = best_cuts(self.row, self.framed(edges))
        assert best is not None, "edges that admit cuts have best cuts"
        groups: dict[str, list[int]] = defaultdict(list)
        for edge in edges:
            groups[_place_in_layer(self.line.nodes[edge - 1])].append(edge)
        most = min(best[0] * ALIKE, limit)
        lightest = (most, best[1])
        for group in groups.values():
            if cuts_within(self.row, self.framed(group), lightest[0]) is not None:
                lightest = min(lightest, best_cuts(self.row, self.framed(group)) or lightest)
        return lightest[1]

    def thinned(self, cuts: list[int], edges: list[int], limit: float) -> list[int]:
        """Move each cut to the thinnest place between its neighbours that keeps the balance within `limit`."""
        cuts = list(cuts)
        totals = self.row.totals
        for k, cut in enumerate(cuts):
            low, high = (cuts[k - 1] if k else 0), (cuts[k + 1] if k + 1 < len(cuts) else len(totals) - 1)
            narrower = [e for e in edges if low < e < high and self.width[e] < self.width[cut]]
            for edge in sorted(narrower, key=lambda e, cut=cut: (self.width[e], abs(totals[e] - totals[cut]))):  # type: ignore[misc]
                moved = [*cuts[:k], edge, *cuts[k + 1 :]]
                if cuts_within(self.row, [0, *moved, len(totals) - 1], limit) == moved:
                    cuts = moved
                    break
        return cuts


def _place_in_layer(node: Node) -> str:
    """A key shared by the same operation of repeated layers: its module path without numbers, and its line."""
    origin = origin_of(node)
    where = (re.sub(r"\d+", "*", origin.module), origin.file, origin.line) if origin else ()
    return f"{where} {node.target}"


def _require_places(search: _CutSearch) -> None:
    needed = search.row.stages - 1
    if len(search.places) < needed:
        count, s = len(search.places), "s" * (len(search.places) != 1)
        raise PartitionError(
            f"the model can be cut in {count} place{s}, so into at most {count + 1} stages; the schedule needs "
            f"{needed + 1}, those of all ranks. Use fewer ranks, fewer stages a rank, or a deeper model."
        )
