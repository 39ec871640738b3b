"""The watch of one rank, with a store that is gone, does not answer, or holds no fault."""

import contextlib
import threading
import time
from typing import Any

import pytest

from zbcompile.errors import FaultError
from zbcompile.faults.board import SilentStoreError
from zbcompile.faults.fault_report import Fault, Position, Status
from zbcompile.faults.watchdog import Watch


class GoneStore:
    """The board of a store whose server has ended."""

    members = (0, 1)
    address = "10.0.0.1:1234"

    def __getattr__(self, name: str) -> Any:
        return self._fail

    def _fail(self, *args: object) -> None:
        raise RuntimeError("connection reset by peer")

    def close(self) -> None:
        pass


class SilentStore(GoneStore):
    """The board of a store whose server does not answer."""

    def __init__(self) -> None:
        self.asked, self.given_up = 0, False

    def beat(self, status: Status) -> None:
        self.asked += 1
        raise SilentStoreError

    def cut(self) -> None:
        self.given_up = True


class OpenStore(GoneStore):
    """The board of a store that answers and holds no fault; `said` are the statuses of this
    rank."""

    def __init__(self) -> None:
        self.said: list[Status] = []

    def beat(self, status: Status) -> None:
        self.said.append(status)

    def _fail(self, *args: object) -> None:
        return None


class Idle:
    """A device that has nothing to do."""

    def mark(self) -> None:
        pass

    def behind(self) -> bool:
        return False


@pytest.fixture
def watch() -> Any:
    made = Watch(Position(rank=1), GoneStore(), (), 5.0, "gloo", Idle())  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_store_is_given_up_only_once_a_rank_has_waited_for_long() -> None:
    store: Any = SilentStore()
    watch = Watch(Position(rank=1), store, (), 0.2, "gloo", Idle())  # type: ignore[arg-type]
    while store.asked < 3 and watch._thread.is_alive():
        time.sleep(0.05)
    assert watch.fault is None
    with watch.position.waiting("a message"):
        watch._thread.join(60)
    assert store.given_up
    assert watch.fault is not None
    assert "cannot be reached from rank 1" in watch.fault.cause
    watch.close()


def test_a_call_that_goes_on_after_its_rank_has_given_up_raises(watch: Watch) -> None:
    """What it waited in could not be cut, and has arrived after all: the other ranks have ended."""
    watch._thread.join(5)
    watch.fault, watch.stopped = None, threading.Event()
    with (
        pytest.raises(FaultError, match="rank 0 failed at step 3: it broke"),
        watch.region("step 3"),
    ):
        watch.fault = Fault(0, "step 3", "it broke")


def test_a_script_that_fails_outside_of_a_call_says_why_it_closes() -> None:
    board: Any = OpenStore()
    watch = Watch(Position(rank=1), board, (), 5.0, "gloo", Idle())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bad row"), contextlib.closing(watch):
        raise ValueError("bad row 17\nin the data")
    assert board.said[-1].ended == "it closed its pipeline, after ValueError: bad row 17"
