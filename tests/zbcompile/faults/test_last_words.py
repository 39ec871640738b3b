"""A rank that is asked to end outside of a call says why, also if the store has gone."""

import contextlib
import io
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest

from zbcompile.errors import FaultError
from zbcompile.faults.board import SilentStoreError
from zbcompile.faults.fault_report import Fault, Position, Status
from zbcompile.faults.termination import TerminationRequest, not_yet_terminated, watch_termination
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
    """The board of a store that answers and holds no fault; `said` are the statuses of this rank."""

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


def test_the_lost_store_is_named(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not watch.say_before_end()
    assert "rank 0 failed" in (said := capsys.readouterr().err)
    assert "it hosts the store of the process group" in said


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
    with pytest.raises(FaultError, match="rank 0 failed at step 3: it broke"), watch.region("step 3"):
        watch.fault = Fault(0, "step 3", "it broke")


@pytest.mark.parametrize("refused", [False, True])
def test_a_call_behind_one_inside_of_it_is_still_under_way(watch: Watch, refused: bool) -> None:
    """Such as a save that takes the weights first: terminated after that, it raises, and does not end in silence."""
    watch._thread.join(5)
    watch.fault, watch.stopped = None, threading.Event()

    def save() -> None:
        with contextlib.suppress(ValueError), watch.region("state_dict"):
            if refused:
                raise watch.known_to_all(ValueError("a wrong name"))
        watch.say_before_end()

    with pytest.raises(FaultError, match="rank 0 failed") as raised, watch.region("save"):
        save()
    assert isinstance(raised.value.__context__, TerminationRequest)
    assert not watch.say_before_end()


def test_what_a_call_has_raised_is_said(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    watch.fault = Fault(0, "step 3", "it broke")
    assert not watch.say_before_end()
    assert "rank 0 failed at step 3: it broke" in capsys.readouterr().err


def test_what_was_posted_before_the_store_went_is_said(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that computes for long reads it, and speaks only when the one that keeps the store has ended."""
    watch._thread.join(5)
    watch.fault, watch.heard = None, Fault(2, "F0.1 of step 3", "it broke")
    assert not watch.say_before_end()
    assert "rank 2 failed at F0.1 of step 3: it broke" in capsys.readouterr().err


def test_a_script_that_fails_outside_of_a_call_says_why_it_closes() -> None:
    board: Any = OpenStore()
    watch = Watch(Position(rank=1), board, (), 5.0, "gloo", Idle())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bad row"), contextlib.closing(watch):
        raise ValueError("bad row 17\nin the data")
    assert board.said[-1].ended == "it closed its pipeline, after ValueError: bad row 17"


def test_a_worker_that_is_terminated_says_nothing_and_its_parent_goes_on(watch: Watch, capfd: Any) -> None:
    """Such as one of a DataLoader: it has its parent's pipelines and the pipe of its signals."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: (there.send("here"), time.sleep(60)))
    process.start()
    assert process.pid is not None
    assert here.recv() == "here"
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == -signal.SIGTERM
    assert watch._termination is not None
    assert watch._termination.since() is None
    assert "failed" not in capfd.readouterr().err


def test_a_script_keeps_its_pipe_for_signals() -> None:
    """As asyncio has one."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        assert watch_termination(Watched()) is None
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


class Watched:
    """A pipeline that has nothing to say."""

    def say_before_end(self) -> bool:
        return False


def test_it_is_said_while_torch_formats_the_error_that_ends_the_process(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed's excepthook replaces `sys.stderr` meanwhile."""
    watch.fault = Fault(0, "step 3", "it broke")
    with contextlib.redirect_stderr(io.StringIO()):
        assert not watch.say_before_end()
    assert "rank 0 failed at step 3: it broke" in capfd.readouterr().err


def test_a_rank_that_is_asked_as_it_begins_to_explain_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` runs the handler of a signal that has just come before it replaces it."""
    usual, asked = signal.signal, [TerminationRequest()]

    def replaced(number: int, handler: Any) -> Any:
        if asked:
            raise asked.pop()
        return usual(number, handler)

    monkeypatch.setattr(signal, "signal", replaced)
    with not_yet_terminated():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_call_that_computes_says_it_before_it_raises(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    """C++ below it may end the process where an exception would pass."""
    watch._thread.join(5)
    watch.fault, watch.inside = None, True
    with pytest.raises(TerminationRequest):
        watch.say_before_end()
    assert "rank 0 failed" in capsys.readouterr().err
