"""Which rank is blamed: by what it said, and by when it was heard of last."""

import time
from dataclasses import replace

from zbcompile.faults.fault_report import (
    NEVER,
    Heartbeats,
    Status,
    find_gone,
    find_late,
    find_stray,
)

WAITS = Status(7, 3, "step 2", "B0.1", waits=True)
BUSY = Status(7, 3, "step 2", "F1.0", waits=False)


def heard(*pairs: tuple[int, float]) -> Heartbeats:
    """Heartbeats of ranks that were last heard of so many seconds ago."""
    return Heartbeats({rank: (7, time.monotonic() - ago) for rank, ago in pairs})


def test_a_silent_rank_is_blamed_and_not_a_busy_one() -> None:
    statuses = {0: WAITS, 1: BUSY, 2: WAITS}
    fault = find_gone(0, statuses, heard((0, 9.0), (1, 0.5), (2, 9.0)), 2.0)
    assert fault is not None
    assert (fault.rank, fault.where) == (2, "B0.1 of step 2")
    assert "is frozen" in fault.cause
    assert find_gone(0, statuses, heard((1, 0.5), (2, 1.0)), 2.0) is None


def test_a_rank_that_closed_its_pipeline_left_early() -> None:
    closed = Status(
        9,
        2,
        "step 1",
        "the end",
        waits=False,
        ended="it closed its pipeline, after ValueError: bad row",
    )
    fault = find_gone(0, {0: WAITS, 1: closed}, Heartbeats(), 2.0)
    assert fault is not None
    assert "it closed its pipeline, after ValueError: bad row. Its last sign" in fault.cause


def test_one_that_never_came_is_not_dead() -> None:
    assert find_gone(0, {0: WAITS, 1: NEVER}, heard((1, 9.0)), 2.0) is None
    assert find_late(0, {0: WAITS, 1: NEVER}, 5.0).rank == 1


def test_no_rank_is_blamed_if_all_live_and_wait() -> None:
    fault = find_late(0, {0: WAITS, 1: WAITS}, 5.0)
    assert fault.rank is None
    assert str(fault.error()).startswith(
        "the ranks' connection failed at B0.1 of step 2: every rank shows signs of life"
    )


def test_a_rank_that_waits_less_than_others_blames_none_of_them() -> None:
    statuses = {0: replace(WAITS, timeout=1.0), 1: replace(BUSY, timeout=60.0)}
    fault = find_late(0, statuses, 1.0)
    assert fault.rank == 0
    assert fault.cause.startswith("timeout= is 1 on rank 0 and 60 on rank 1")


def test_a_sign_of_life_resets_the_silence() -> None:
    heartbeats = heard((1, 9.0))
    heartbeats.note({1: Status(8, 3, "step 2", "", waits=False)})
    assert not heartbeats.silent(1, 2.0)


def test_what_a_rank_said_before_proves_no_other_call() -> None:
    """A process too busy to say that it has gone on seems to wait where it was: only a later sign
    of life counts."""
    statuses = {0: WAITS, 1: Status(7, 3, "eval", "the exchange", waits=True)}
    assert find_stray(0, statuses, {}) is None
    assert find_stray(0, statuses, {0: 7, 1: 7}) is None
    fault = find_stray(0, statuses, {0: 7, 1: 6})
    assert fault is not None
    assert (fault.rank, fault.where) == (1, "the exchange of eval")
    assert fault.cause.startswith("rank 0 is at B0.1 of step 2 meanwhile")
