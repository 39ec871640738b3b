"""The watch of one rank, with a store that is gone, or does not answer."""

import time
from typing import Any

import pytest
import torch

from zbcompile.errors import FaultError
from zbcompile.faults import watch as module
from zbcompile.faults.rank_status import Fault, RankStatus
from zbcompile.faults.watch import Watch


class Store:
    """A store that answers and has no fault, or does what `fails` does."""

    members = (0, 1)
    address = "10.0.0.1:1234"

    def __init__(self, fails: Any = None) -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        return self._answer

    def _answer(self, *args: object) -> Any:
        return None if self.fails is None else self.fails()


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
    monkeypatch.setattr(module, "INTERVAL", 0.05)
    watch = watch_with(Store(lambda: time.sleep(30)))
    watch.timeout = 0.2
    end = time.monotonic() + 10
    while watch.fault is None and time.monotonic() < end:
        time.sleep(0.1)
    assert watch.fault is not None
    assert "its process ended, is frozen" in watch.fault.cause


def test_a_frozen_store_does_not_block_the_error_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
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
