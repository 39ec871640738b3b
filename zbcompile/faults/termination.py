"""The end of a process: a launcher sends SIGTERM to all ranks once one has ended. Each should first say why it ends."""

import contextlib
import functools
import io
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Protocol


class TerminationRequest(BaseException):
    """This process was asked to end while it ran a call of a pipeline."""

    def __str__(self) -> str:
        return "it was terminated (SIGTERM)"


def say_at_end(what: object) -> None:
    """Print to standard error from a signal handler. While torch formats the error that ends the process, `sys.stderr`
    is a buffer that a signal leaves unprinted (torch.distributed's excepthook, 2.11-2.13)."""
    file = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    print(f"zbcompile: {what}", file=file, flush=True)


class WatchedPipeline(Protocol):
    """A pipeline that can say what happened."""

    def say_before_end(self) -> bool: ...


class Termination:
    """The handler of SIGTERM for the pipelines of this process.

    Python runs a handler in the main thread between two bytecodes, and so not while that thread waits inside torch.
    Therefore the signal also writes a byte into a pipe, which the watching thread of a pipeline reads by `since`.
    """

    def __init__(self) -> None:
        self.pipelines: weakref.WeakSet[WatchedPipeline] = weakref.WeakSet()
        self._asked: float | None = None
        self._open()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _open(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def _leave_to_parent(self) -> None:
        """In a new process: the pipe and the pipelines are the parent's."""
        self.release()
        self.pipelines.clear()
        os.close(self._read)
        os.close(self._write)
        self._open()

    def since(self) -> float | None:
        """Seconds since this process was asked to end; None if it was not."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._read, 512) and self._asked is None:
                self._asked = time.monotonic()
        return None if self._asked is None else time.monotonic() - self._asked

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """The second signal ends the process as if this handler had never been there."""
        self.release()
        with not_yet_terminated():
            said = [each.say_before_end() for each in self.pipelines]
            if any(said):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    def install(self) -> bool:
        """Take SIGTERM; False if the process has a pipe for signals of its own."""
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return False
        self.since()  # empties the pipe of what was asked of earlier pipelines
        self._asked = None
        signal.signal(signal.SIGTERM, self)
        return True

    def release(self) -> None:
        """Give SIGTERM back, unless somebody else has taken it since."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


@functools.cache
def _handler() -> Termination:
    """The handler of this process, made once: its pipe and its hook at a fork stay until the process ends."""
    return Termination()


def watch_termination(pipeline: WatchedPipeline) -> Termination | None:
    """Tell `pipeline` of SIGTERM as long as it lives. Does nothing and returns None if the user has a handler, or a
    pipe for signals, and on any thread but the main one, which alone can set handlers."""
    found = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = _handler()
    if found is not handler and (found is not signal.SIG_DFL or not handler.install()):
        return None
    handler.pipelines.add(pipeline)
    return handler


def stop_watching(termination: Termination | None, pipeline: WatchedPipeline) -> None:
    """Tell `pipeline` no longer; with the last pipeline SIGTERM is given back."""
    if termination is not None:
        termination.pipelines.discard(pipeline)
        if not termination.pipelines and threading.current_thread() is threading.main_thread():
            termination.release()


@contextlib.contextmanager
def not_yet_terminated() -> Iterator[None]:
    """Ignore SIGTERM inside: a rank that is about to raise should first say why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except TerminationRequest:  # asked just now
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
