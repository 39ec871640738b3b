"""An optimizer that is divided among replicas trains as one that is not: every bit of losses, norms
and parameters."""

import pytest

from tests.support.pool import Pool
from tests.support.sharded_optimizers import Result, Training, at_levels
from tests.support.training import assert_same_tensors


def assert_bitwise(runs: list[list[Result]]) -> None:
    for whole, *sharded in runs:
        for found in sharded:
            assert_same_tensors(found.losses, whole.losses, "loss of step")
            assert_same_tensors(found.norms, whole.norms, "norm of step")
            assert_same_tensors(found.state, whole.state, "state dict:")


SLOW = [
    Training("small-tied", "zb-v", clip=0.05),
    Training("short-mlp", "zb-v", kind="Muon"),
    Training("short-mlp", "1f1b", kind="EightBits"),
    Training("small-tied", "zb-h1"),
    Training("small-tied", "dualpipe-v", clip=0.05),
    Training("small-tied", "zb-h1", vocab=1, clip=0.05),
    Training("short-mlp", "zb-h1", clip=0.05, updates=5),
    Training("small-tied", "zb-v", unsynchronised=2, clip=0.05),
]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    "training",
    [
        Training("short-mlp", "zb-h1", dtype="bfloat16", clip=0.05),
        *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW),
    ],
    ids=str,
)
def test_every_bit_is_that_of_an_optimizer_that_is_not_divided(
    training: Training, pool: Pool
) -> None:
    runs = pool.run(at_levels, training, ranks=4)
    assert_bitwise(runs)
    for whole, *sharded in runs:
        assert min(whole.gradients) > 0
        for found in sharded:
            assert set(found.gradients) == {0}
            assert found.held <= whole.held / 2 + 2 * 4 * 64
