"""The pool itself: what it reports when a rank fails or hangs, and that it works on afterwards."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool, TaskFailed

pytestmark = pytest.mark.waits


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("no")
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(1)


def test_a_failure_names_its_rank(pool: Pool) -> None:
    with pytest.raises(TaskFailed, match=r"(?s)rank 0: fine.*rank 1: Traceback.*ValueError: no"):
        pool.run(fail_on, 1)
    assert [outcome.error for outcome in pool.outcomes(fail_on, 0)] == ["ValueError", None]
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.slow
def test_a_rank_that_dies_is_replaced(pool: Pool) -> None:
    with pytest.raises(TaskFailed, match=r"(?s)rank 0: fine.*rank 1: the process ended"):
        pool.run(die_on, 1)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]
