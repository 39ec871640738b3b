"""Calls of a store that end: torch bounds how long it waits for a key, but not for the answer of the server, which may
be frozen or cut off (2.11-2.13)."""

import contextlib
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")
ANSWER = 3.0  # seconds in which a store answers
GRACE = 0.25  # and one that has not answered before


class SilentStoreError(RuntimeError):
    """The store has not answered in time; it may answer later."""


class BoundedStore:
    """A store that a thread of its own asks, so that no other thread waits longer than it wants to."""

    def __init__(self, store: Any) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        self._closed = False
        self._port = port_of(store)
        threading.Thread(target=_answer, args=(store, self._calls), name="zbcompile-store", daemon=True).start()

    def ask(self, what: Callable[[Any], Value], within: float = ANSWER) -> Value:
        """The value of `what(store)`. Raises SilentStoreError if that takes more than `within` seconds, RuntimeError if
        the store is closed or gone."""
        if self._closed:
            raise RuntimeError("the store of the process group is closed")
        answer: Future[Any] = Future()
        self._calls.put((answer, what))
        known = self._late is not None and not self._late.done()
        try:
            return answer.result(GRACE if known else within)  # type: ignore[no-any-return]
        except TimeoutError:
            self._late = answer
            raise SilentStoreError(f"the store of the process group has not answered for {within:g} s") from None

    def cut(self) -> None:
        """End every call that waits for an answer of the store's server, on whichever thread."""
        cut_connections_to(self._port)

    def close(self) -> None:
        """Release the store. Later calls raise RuntimeError."""
        self._closed = True
        self._calls.put(None)


def _answer(store: Any, calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None]") -> None:
    while (call := calls.get()) is not None:
        answer, what = call
        try:
            answer.set_result(what(store))
        except BaseException as error:
            answer.set_exception(error)
        del call, answer, what


def port_of(store: Any) -> int | None:
    """The port of a store's server; None for a store without one, such as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


@contextlib.contextmanager
def cut_after(seconds: float, port: int | None) -> Iterator[None]:
    """Around calls of torch that may wait for a store's server: after so long they raise RuntimeError, as soon as they
    make no new connections."""
    done = threading.Event()

    def cut() -> None:
        wait = seconds
        while not done.wait(wait):
            cut_connections_to(port)
            wait = GRACE

    threading.Thread(target=cut, name="zbcompile-cut", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def cut_connections_to(port: int | None) -> None:
    """Shut down this process's connections to a port: what waits in them raises. torch's client gives no other way."""
    if port is None:
        return
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    _shut_down(connection, port)


def _shut_down(connection: socket.socket, port: int) -> None:
    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
    if internet and connection.getpeername()[1] == port:
        connection.shutdown(socket.SHUT_RDWR)
