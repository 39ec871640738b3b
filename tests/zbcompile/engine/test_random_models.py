"""Random models have eager's bits: shared layers, buffers, dropout, writes in place, regions without
gradients and skip connections in any combination.

A failure names the seed: `RandomModel(seed).recipe` is what the model does.
"""

import pytest

from tests.support.training import Case, assert_bitwise, quickly, reference

SCHEDULES = (("zb-h1", 2), ("zb-v", 2), ("1f1b", 3), ("interleaved-zb", 2), ("zb-v", 3))


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int) -> None:
    for schedule, ranks in (SCHEDULES[seed % 5], SCHEDULES[(seed + 2) % 5]):
        case = Case(f"random-{seed}", schedule, ranks, 2 * ranks, steps=2)
        assert_bitwise(quickly(case), reference(case))
