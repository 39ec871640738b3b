"""What the pool of ranks reports when one fails, hangs or dies, and that it works on afterwards."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool, TaskFailed

pytestmark = [pytest.mark.waits, pytest.mark.slow]


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def fail() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, r"(?s)rank 0: fine.*rank 1: Traceback.*ValueError: no"),
        (hang, r"(?s)ranks \[1\] did not end.*rank 1: still running.*in hang"),
        (die, r"(?s)rank 0: fine.*rank 1: the process ended"),
    ],
    ids=["fail", "hang", "die"],
)
def test_a_rank_that_does_not_end_well_is_shown(function: object, message: str, pool: Pool) -> None:
    with pytest.raises(TaskFailed, match=message):
        pool.run(function, timeout=60 if function is not hang else 2)  # type: ignore[arg-type]
    assert pool.run(sum_of_ranks) == [1.0, 1.0]
