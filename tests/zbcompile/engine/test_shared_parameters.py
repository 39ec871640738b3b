"""Parameters that are used several times have the gradients of eager: every use counts, in eager's
order. A parameter used on several stages has one gradient per use until they are added up, so every
model runs under schedules that place the uses differently."""

from dataclasses import replace

import pytest

from tests.support.shared_parameters import SHARED_PARAMETERS
from tests.support.training import Case, assert_bitwise, assert_close, quickly, reference

SCHEDULES = ("zb-h1", "zb-v", "interleaved-zb")


@pytest.mark.mostly_slow(every=len(SHARED_PARAMETERS), suite=1)
@pytest.mark.parametrize("problem", SHARED_PARAMETERS)
def test_gradients_are_eagers_bits_and_close_by_default(problem: str) -> None:
    for schedule in SCHEDULES:
        case = Case(problem, schedule, 2, 4, steps=1)
        assert_bitwise(quickly(case), reference(case))
        if schedule == "zb-v" and not problem.endswith("bfloat16"):
            assert_close(quickly(replace(case, exact=False)), reference(case))


@pytest.mark.slow
def test_recomputation_keeps_the_bits() -> None:
    case = Case("loop-3-bfloat16", "zb-v", 2, 4, steps=1)
    assert_bitwise(quickly(replace(case, recompute="full")), reference(case))
