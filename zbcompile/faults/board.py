"""Out-of-band rank status and faults, kept in the process group's store.

It works when messages do not: a rank that failed, or one whose peer is gone, can still write to it
and read from it. Every call ends in bounded time. torch itself bounds only the wait for a key, not
that for the answer of the server, which may be frozen or cut off (2.11-2.13).
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.faults.abort import cut_connections_to, port_of
from zbcompile.faults.fault_report import NEVER, Fault, Status

Value = TypeVar("Value")
ANSWER = 3.0  # seconds in which a store answers
GRACE = 0.25  # seconds for a store that did not answer in time before


class SilentStoreError(RuntimeError):
    """The store has not answered in time; it may answer later."""


class BoundedStore:
    """A store that only one thread asks, over a connection of its own, so that each caller waits
    only as long as it asks for."""

    def __init__(self, store: Any) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._late: Future[Any] | None = None
        self._closed = False
        self._port = port_of(store)
        threading.Thread(
            target=_answer, args=(store, self._calls), name="zbcompile-store", daemon=True
        ).start()

    def ask(self, what: Callable[[Any], Value], within: float = ANSWER) -> Value:
        """The value of `what(store)`. Raises SilentStoreError after `within` seconds, RuntimeError
        if the store is gone."""
        if self._closed:
            raise RuntimeError("the store of the process group is closed")
        answer: Future[Any] = Future()
        self._calls.put((answer, what))
        known = self._late is not None and not self._late.done()
        try:
            return answer.result(GRACE if known else within)  # type: ignore[no-any-return]
        except TimeoutError:
            self._late = answer
            raise SilentStoreError(
                f"the store of the process group has not answered for {within:g} s"
            ) from None

    def cut(self) -> None:
        """End every call that waits for an answer of the store's server, on whichever thread."""
        cut_connections_to(self._port)

    def close(self) -> None:
        """Release the store. Later calls raise RuntimeError."""
        self._closed = True
        self._calls.put(None)


def _answer(
    shared: Any, calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None]"
) -> None:
    store = None
    while (call := calls.get()) is not None:
        answer, what = call
        try:
            store = shared.clone() if store is None else store
            answer.set_result(what(store))
        except BaseException as error:
            answer.set_exception(error)
        del call, answer, what


class Board:
    """One pipeline's keys in the store of its process group, over a separate connection (a blocked
    call on the group's connection must not keep the watchdog from reading). No call takes much
    longer than ANSWER, the first one than `timeout`; all raise RuntimeError if the store does not
    answer."""

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[int], rank: int, timeout: float
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        shared: Any = group.get_group_store()  # `clone` is missing in torch's type stubs (2.13)
        self._store = BoundedStore(shared)
        serial = self._store.ask(lambda store: store.add(f"zbcompile/made/{rank}", 1), timeout)
        self._name = f"zbcompile/{serial}"  # every rank makes its pipelines in the same order
        self.address = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{port_of(shared)}"

    def _ask(self, what: Callable[[Any], Value], within: float = ANSWER) -> Value:
        return self._store.ask(lambda store: what(dist.PrefixStore(self._name, store)), within)

    def private_store(self, group: dist.ProcessGroup) -> dist.Store:
        """A rendezvous store for the ranks of `group`, shared with no other group or pipeline."""
        first = dist.get_process_group_ranks(group)[0]
        return dist.PrefixStore(f"{self._name}/channels/{first}", group.get_group_store())

    def exchange(self, what: str, value: str, timeout: float) -> dict[int, str]:
        """The values of all ranks for `what`, once every rank has given one; PipelineError after
        `timeout` seconds."""
        keys = {rank: f"{what}/{rank}" for rank in self.members}
        self._ask(lambda store: store.set(keys[self.rank], value))
        try:
            self._ask(
                lambda store: store.wait(list(keys.values()), timedelta(seconds=timeout)),
                timeout + ANSWER,
            )
        except RuntimeError as error:
            missing = self._ask(
                lambda store: [rank for rank, key in keys.items() if not store.check([key])]
            )
            raise PipelineError(
                f"ranks {missing} did not make their part of the pipeline within {timeout:g} s."
                " Every rank must call zbcompile.pipeline."
            ) from error
        return self._ask(
            lambda store: {rank: store.get(key).decode() for rank, key in keys.items()}
        )

    def beat(self, status: Status) -> None:
        """Publish this process's heartbeat and position."""
        self._ask(lambda store: store.set(f"status/{self.rank}", status.text()))

    def statuses(self) -> dict[int, Status]:
        """The latest status of every rank; NEVER for one that has not published any."""
        return self._ask(lambda store: {rank: _status(store, rank) for rank in self.members})

    def post(self, region: int, fault: Fault) -> Fault:
        """Post a fault of a region; return the fault that all ranks see, which is the first one
        posted."""
        return Fault.read(
            self._ask(lambda store: store.compare_set(f"fault/{region}", "", fault.text())).decode()
        )

    def posted(self, region: int) -> Fault | None:
        """The fault of a region, or the one that ended the process group's connections for good."""
        return self._ask(lambda store: _posted(store, region))

    def end(self, fault: Fault) -> None:
        """Record that nothing can be sent any more, because of `fault`."""
        self._ask(lambda store: store.set("ended", fault.text()))

    def leave(self, region: int) -> None:
        """Record that this rank has learnt of the fault of a region."""
        self._ask(lambda store: store.add(f"left/{region}", 1))

    def all_left(self, region: int) -> bool:
        """Whether all ranks have learnt of the fault of a region."""
        return self._ask(lambda store: store.add(f"left/{region}", 0)) >= len(self.members)

    def cut(self) -> None:
        """Give the store up: every call of this process that waits for it raises RuntimeError."""
        self._store.cut()

    def close(self) -> None:
        """Release the store, so that the process that hosts it can end it. Later calls on the board
        raise RuntimeError, as if the store did not answer."""
        self._store.close()


def _status(store: Any, rank: int) -> Status:
    key = f"status/{rank}"
    return Status.read(store.get(key).decode()) if store.check([key]) else NEVER


def _posted(store: Any, region: int) -> Fault | None:
    for key in (f"fault/{region}", "ended"):
        if store.check([key]):
            return Fault.read(store.get(key).decode())
    return None
