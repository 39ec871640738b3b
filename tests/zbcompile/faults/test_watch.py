"""The watch of one rank, with a store that is gone, or does not answer; and the rank that is named
for a wait that took too long."""

import time
from typing import Any

import pytest
import torch

from zbcompile.errors import FaultError
from zbcompile.faults import watch as module
from zbcompile.faults.rank_status import Fault, RankStatus, find_straggler
from zbcompile.faults.watch import Watch


class Store:
    """A store that answers and has no fault, or does what `answer` does."""

    members, address = (0, 1), "10.0.0.1:1234"

    def __init__(self, answer: Any = lambda: None) -> None:
        self.answer = answer

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.answer()


def watch_with(store: Any) -> Watch:
    return Watch(RankStatus(rank=1), store, (), 5.0, "gloo", torch.device("cpu"))


def gone() -> None:
    raise RuntimeError("connection reset by peer")


def test_a_store_that_is_gone_ends_the_rank() -> None:
    watch = watch_with(Store(gone))
    watch._thread.join(60)
    assert watch.fault is not None
    assert "cannot be reached from rank 1" in watch.fault.cause
    watch.close()


def test_a_frozen_store_ends_the_wait_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not block the error of a rank."""
    monkeypatch.setattr(module, "INTERVAL", 0.05)
    watch = watch_with(Store(lambda: time.sleep(30)))
    watch.timeout = 0.2
    watch._thread.join(10)
    assert watch.fault is not None
    assert "its process ended, is frozen" in watch.fault.cause
    monkeypatch.setattr(module, "ANSWER", 0.2)
    watch = watch_with(Store(lambda: time.sleep(5)))
    with pytest.raises(FaultError, match="is frozen, or cannot be"), watch.region("step 3"):
        raise ValueError("bad row")


def test_a_call_that_goes_on_after_its_rank_has_given_up_raises() -> None:
    """The wait could not be aborted, and its message has arrived: the other ranks have ended."""
    watch = watch_with(Store())
    with (
        pytest.raises(FaultError, match="rank 0 failed at step 3: it broke"),
        watch.region("step 3"),
    ):
        watch.fault = Fault(0, "step 3", "it broke")
    watch.close()


WAITS = RankStatus(0, 3, "step 2", "B0.1", waits=True)
BUSY = RankStatus(1, 3, "step 2", "F1.0", waits=False)
EARLIER = RankStatus(2, 2, "step 1", "the end")
ELSEWHERE = RankStatus(1, 3, "eval", "the exchange", waits=True)
BLAMED: list[tuple[list[RankStatus | None], int, str, str]] = [
    ([BUSY, None], 2, "its first call", "it never arrived"),
    ([BUSY], 1, "F1.0 of step 2", "it did not finish; rank 0 waited 5 s for it at B0.1 of step 2"),
    ([BUSY, EARLIER], 2, "the end of step 1", "it went no further"),
    ([ELSEWHERE], 1, "the exchange of eval", "rank 0 is at B0.1 of step 2 meanwhile. Every rank m"),
]


@pytest.mark.parametrize(("others", "rank", "where", "cause"), BLAMED)
def test_the_rank_that_is_blamed(
    others: list[RankStatus | None], rank: int, where: str, cause: str
) -> None:
    """One that never came, a busy one, one in an earlier call, one in another call."""
    fault = find_straggler(WAITS, dict(enumerate([WAITS, *others])), 5.0, on_device=False)
    assert (fault.rank, fault.where) == (rank, where)
    assert fault.cause.startswith(cause)


def test_no_rank_if_all_live_and_wait() -> None:
    second = RankStatus(1, 3, "step 2", "F1.0", waits=True)
    fault = find_straggler(WAITS, {0: WAITS, 1: second}, 5.0, on_device=False)
    assert fault.rank is None
    says = "the ranks' connection failed at B0.1 of step 2: every rank shows signs of life"
    assert str(fault.error()).startswith(says)
