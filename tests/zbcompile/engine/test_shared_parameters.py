"""Parameters that are used several times have the gradients of eager: every use counts, in eager's
order.

A parameter used on several stages has one gradient per use until they are added up. Each pass that
collects gradients by their parameter may lose one of them, so every model runs under schedules that
place the uses differently.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.shared_parameters import SHARED_PARAMETERS
from tests.support.training import (
    Case,
    Trained,
    assert_bitwise,
    assert_close,
    join,
    quickly,
    reference,
)

RANKS, MICROBATCHES = 2, 4
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved-zb")
ON_RANKS = {True: ("transposed-loop", "three-embeddings"), False: ("shared-scale",)}


RARELY = ("loop-3", "loop-8", "loop-once", "loop-3-float64", "shared-scale")


def also_rarely(problem: str) -> Any:
    """Returns a case, which the suite leaves out where others are much like it."""
    marks = [pytest.mark.beyond_sample] if problem in RARELY else []
    return pytest.param(problem, marks=marks)


def cases_of(problem: str, exact: bool) -> list[Case]:
    return [
        Case(problem, schedule, RANKS, MICROBATCHES, exact=exact, steps=1) for schedule in SCHEDULES
    ]


@pytest.mark.mostly_slow(every=len(SHARED_PARAMETERS), suite=1)
@pytest.mark.parametrize("problem", [also_rarely(name) for name in SHARED_PARAMETERS])
def test_exact_gradients_are_eagers_bits(problem: str) -> None:
    for case in cases_of(problem, exact=True):
        assert_bitwise(quickly(case), reference(case))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    "problem", [name for name in SHARED_PARAMETERS if not name.endswith("bfloat16")]
)
def test_default_gradients_are_close(problem: str) -> None:
    for case in cases_of(problem, exact=False):
        assert_close(quickly(case), reference(case))


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["loop-3-bfloat16", "albert"])
def test_recomputation_keeps_the_bits(problem: str) -> None:
    for case in cases_of(problem, exact=True)[1:3]:
        assert_bitwise(quickly(replace(case, recompute="full")), reference(case))


def train_all(cases: list[Case]) -> list[Trained]:
    return [quickly(case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default"])
def test_in_two_processes(exact: bool, pool: Pool) -> None:
    cases = [case for problem in ON_RANKS[exact] for case in cases_of(problem, exact)[::2]]
    train_all(cases)  # what is compiled here the ranks have
    shares = pool.run(train_all, cases, ranks=RANKS)
    for case, *of_ranks in zip(cases, *shares, strict=True):
        compare = assert_bitwise if exact else assert_close
        compare(join(of_ranks), reference(case))
