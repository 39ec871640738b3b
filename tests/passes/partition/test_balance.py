"""The solvers against brute force over all cuts."""

import random
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest

from zbcompile.passes.partition.balance import (
    CHUNK_SHARE,
    PIECE_SLACK,
    LoadRow,
    best_cuts,
    heaviest_piece,
)
from zbcompile.schedules.ir.placement import Placement

PLACEMENTS = [("linear", 3, 1), ("looped", 2, 2), ("v", 2, 2), ("v", 3, 2)]


def heaviest(
    loads: Sequence[float], cuts: Sequence[int], placement: Placement, edges: Sequence[int]
) -> float:
    """The objective once more: the heaviest stage, or rank of a V with its rule for chunks."""
    stages = [sum(loads[a:b]) for a, b in pairwise([0, *cuts, len(loads)])]
    if placement.kind != "v":
        return max(stages)
    piece = max(sum(loads[a:b]) for a, b in pairwise(edges))
    chunk = max(stages)
    ranks = [sum(stages[s] for s in placement.stages_of(r)) for r in range(placement.ranks)]
    return max(*ranks, chunk / CHUNK_SHARE if chunk > piece * PIECE_SLACK else 0)


@pytest.mark.parametrize("named", PLACEMENTS, ids=str)
def test_no_cuts_are_better(named: tuple[str, int, int]) -> None:
    placement, any_ = Placement.named(*named), random.Random(str(named))
    ranks_of = [placement.rank(stage) for stage in range(placement.stages)]
    for _ in range(150):
        largest = any_.choice((9, 60))
        loads = [any_.randint(0, largest) for _ in range(any_.randint(1, 13))]
        inner = [i for i in range(1, len(loads)) if any_.random() < 0.8]
        edges, totals = [0, *inner, len(loads)], [0.0, *accumulate(loads)]
        row = LoadRow(totals, ranks_of, heaviest_piece(totals, edges))
        actual = best_cuts(row, edges)
        choices = list(combinations(inner, placement.stages - 1))
        if not choices:
            assert actual is None
            continue
        best = min(heaviest(loads, cuts, placement, edges) for cuts in choices)
        value = heaviest(loads, actual[1], placement, edges)
        assert (actual[0], value) == pytest.approx((best, best), rel=1e-8, abs=1e-12)
        assert set(actual[1]) <= set(inner)
