"""Random models have eager's bits: shared layers, buffers, dropout, writes in place, regions without
gradients and skips in any combination. `RandomModel(seed).recipe` is what the model of a seed does."""

import pytest

from tests.support.training import Case, assert_bitwise, quickly, reference

SCHEDULES = (("zb-h1", 2), ("zb-v", 2), ("1f1b", 3), ("interleaved-zb", 2), ("zb-v", 3))


@pytest.mark.mostly_slow(every=12, suite=4)
@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int) -> None:
    case = Case(f"random-{seed}", *SCHEDULES[seed % 5], microbatches=6, steps=2)
    assert_bitwise(quickly(case), reference(case))
