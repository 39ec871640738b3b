"""An optimizer that is divided among replicas trains as one that is not: every bit of losses, norms
and parameters."""

import pytest

from tests.support.pool import Pool
from tests.support.sharded_optimizers import Result, Training, at_levels
from tests.support.training import assert_same_tensors


def assert_bitwise(runs: list[list[Result]]) -> None:
    for full, *sharded in runs:
        for results in sharded:
            assert_same_tensors(results.losses, full.losses, "loss of step")
            assert_same_tensors(results.norms, full.norms, "norm of step")
            assert_same_tensors(results.state, full.state, "state dict:")


TRAININGS = [
    Training("short-mlp", "zb-h1", dtype="bfloat16", clip=0.05),
    Training("small-tied", "zb-v", clip=0.05),
    Training("small-tied", "zb-v", unsynchronised=2, clip=0.05),
    Training("short-mlp", "1f1b", kind="EightBits"),
    Training("short-mlp", "zb-v", kind="Muon"),
    Training("small-tied", "zb-h1", vocab=1, clip=0.05),
    Training("small-tied", "dualpipe-v", clip=0.05),
]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_every_bit_is_that_of_an_optimizer_that_is_not_divided(
    training: Training, pool: Pool
) -> None:
    alone = training.clip is None or training.dtype == "bfloat16"  # each replica is one rank
    runs = pool.run(at_levels, training, ranks=2 if alone else 4)
    assert_bitwise(runs)
    for full, *sharded in runs:
        assert min(full.gradients) > 0
        for results in sharded:
            assert set(results.gradients) == {0}
            assert results.held <= full.held / 2 + 2 * 4 * 64
