"""The solvers against brute force over all cuts."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from tests.support.generated import examples
from zbcompile.passes.partition.balance import (
    CHUNK_SHARE,
    PIECE_SLACK,
    LoadRow,
    best_cuts,
    heaviest_piece,
)
from zbcompile.schedules.ir.placement import Placement

LOADS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=13)
PLACEMENTS = [
    Placement.named("linear", 3),
    Placement.named("looped", 2, 2),
    Placement.named("v", 2, 2),
    Placement.named("v", 3, 2),
]


def row_of(loads: Sequence[float], placement: Placement, edges: Sequence[int]) -> LoadRow:
    totals = [0.0]
    for load in loads:
        totals.append(totals[-1] + load)
    ranks_of = [placement.rank(stage) for stage in range(placement.stages)]
    return LoadRow(totals, ranks_of, heaviest_piece(totals, edges))


def heaviest(
    loads: Sequence[float], cuts: Sequence[int], placement: Placement, edges: Sequence[int]
) -> float:
    """The objective, written down once more: the heaviest stage, or rank of a V with its rule for
    chunks."""
    stages = [sum(loads[a:b]) for a, b in pairwise([0, *cuts, len(loads)])]
    if placement.kind != "v":
        return max(stages)
    piece = max(sum(loads[a:b]) for a, b in pairwise(edges))
    chunk = max(stages)
    ranks = [sum(stages[s] for s in placement.stages_of(r)) for r in range(placement.ranks)]
    return max(*ranks, chunk / CHUNK_SHARE if chunk > piece * PIECE_SLACK else 0)


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@given(loads=LOADS, data=st.data())
@examples(150)
def test_no_cuts_are_better(placement: Placement, loads: list[int], data: st.DataObject) -> None:
    inner = [i for i in range(1, len(loads)) if data.draw(st.integers(0, 9)) > 1]
    edges = [0, *inner, len(loads)]
    all_cuts = list(combinations(inner, placement.stages - 1))
    actual = best_cuts(row_of(loads, placement, edges), edges)
    if not all_cuts:
        assert actual is None
        return
    best = min(heaviest(loads, cuts, placement, edges) for cuts in all_cuts)
    assert actual is not None
    assert actual[0] == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert heaviest(loads, actual[1], placement, edges) == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert set(actual[1]) <= set(inner)
