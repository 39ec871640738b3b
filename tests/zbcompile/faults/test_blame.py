"""The rank that is named for a wait that took too long."""

from zbcompile.faults.rank_status import RankStatus, find_straggler

WAITS = RankStatus(0, 3, "step 2", "B0.1", waits=True)
BUSY = RankStatus(1, 3, "step 2", "F1.0", waits=False)


def test_one_that_never_came() -> None:
    fault = find_straggler(WAITS, {0: WAITS, 1: BUSY, 2: None}, 5.0, on_device=False)
    assert (fault.rank, fault.where) == (2, "its first call")


def test_a_busy_rank_and_one_in_an_earlier_call() -> None:
    fault = find_straggler(WAITS, {0: WAITS, 1: BUSY}, 5.0, on_device=False)
    assert (fault.rank, fault.where) == (1, "F1.0 of step 2")
    assert fault.cause == "it did not finish; rank 0 waited 5 s for it at B0.1 of step 2"
    earlier = RankStatus(2, 2, "step 1", "the end")
    fault = find_straggler(WAITS, {0: WAITS, 1: BUSY, 2: earlier}, 5.0, on_device=False)
    assert (fault.rank, fault.where) == (2, "the end of step 1")


def test_a_rank_in_another_call() -> None:
    second = RankStatus(1, 3, "eval", "the exchange", waits=True)
    fault = find_straggler(WAITS, {0: WAITS, 1: second}, 5.0, on_device=False)
    assert (fault.rank, fault.where) == (1, "the exchange of eval")
    assert fault.cause.startswith("rank 0 is at B0.1 of step 2 meanwhile. Every rank must make")


def test_no_rank_if_all_live_and_wait() -> None:
    second = RankStatus(1, 3, "step 2", "F1.0", waits=True)
    fault = find_straggler(WAITS, {0: WAITS, 1: second}, 5.0, on_device=False)
    assert fault.rank is None
    assert str(fault.error()).startswith(
        "the ranks' connection failed at B0.1 of step 2: every rank shows signs of life"
    )
