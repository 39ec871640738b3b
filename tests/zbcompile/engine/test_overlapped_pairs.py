"""Pairs whose passes a backend has compiled: the halves run in turn."""

import pytest

import zbcompile
from tests.support.training import (
    Case,
    assert_bitwise,
    interpreted,
    pipeline_of,
    problem_of,
    reference,
    train,
)
from zbcompile.compiler.paired_schedule import with_pairs
from zbcompile.schedules import Costs, Pair, build


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap"])
def test_halves_in_turn(name: str) -> None:
    case = Case("small-tied", name, 2, 8)
    assert_bitwise(train(pipeline_of(case, backend=interpreted), case), reference(case))


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "zb-2p", "dualpipe-v"])
def test_pairs_with_products_keep_the_bits(name: str) -> None:
    """Pairs formed as for stages with collectives."""
    case = Case("small-tied", name, 2, 8)
    schedule = build(name, ranks=2, microbatches=8)
    ones = (1,) * schedule.stages
    costs = Costs(
        ones, ones, ones, forward_exchange=(0.5,) * schedule.stages, backward_exchange=ones
    )
    paired = with_pairs(schedule, costs)
    kinds = {
        (s.first.op, s.second.op) for order in paired.orders for s in order if isinstance(s, Pair)
    }
    assert kinds & {("B", "W"), ("F", "W")}
    problem = problem_of(case.problem)
    pipe = zbcompile.pipeline(
        problem.model(), schedule=paired, microbatches=8, loss=problem.loss, exact=True, ranks=2
    )
    assert_bitwise(train(pipe, case), reference(case))
