"""Out-of-band rank status and faults, kept in the process group's store.

It works when messages do not: a rank that failed, or one whose peer is gone, can still write to it and read from it.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.bounded_store import ANSWER, BoundedStore, cut_after, port_of
from zbcompile.distributed.faults import NEVER, Fault, Status
from zbcompile.errors import PipelineError


class Board:
    """One pipeline's keys in the store of its process group, over a separate connection (a blocked call on the
    group's connection must not keep the watchdog from reading). No call takes much longer than bounded_store.ANSWER;
    all raise RuntimeError if the store does not answer."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], rank: int, timeout: float) -> None:
        self.members = tuple(members)
        self.rank = rank
        shared: Any = group.get_group_store()  # `clone` is missing in torch's type stubs (2.13)
        with cut_after(timeout, port_of(shared)):
            store = shared.clone()
            serial = store.add(f"zbcompile/made/{rank}", 1)  # every rank makes its pipelines in the same order
        self._name = f"zbcompile/{serial}"
        self._store = BoundedStore(dist.PrefixStore(self._name, store))
        self._ask = self._store.ask
        self.address = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{port_of(shared)}"

    def private_store(self, group: dist.ProcessGroup) -> dist.Store:
        """A rendezvous store for the ranks of `group`, shared with no other group or pipeline."""
        first = dist.get_process_group_ranks(group)[0]
        return dist.PrefixStore(f"{self._name}/channels/{first}", group.get_group_store())

    def exchange(self, what: str, value: str, timeout: float) -> dict[int, str]:
        """The values of all ranks for `what`, once every rank has given one. Raises PipelineError after `timeout`
        seconds."""
        keys = {rank: f"{what}/{rank}" for rank in self.members}
        self._ask(lambda store: store.set(keys[self.rank], value))
        try:
            self._ask(lambda store: store.wait(list(keys.values()), timedelta(seconds=timeout)), timeout + ANSWER)
        except RuntimeError as error:
            missing = self._ask(lambda store: [rank for rank, key in keys.items() if not store.check([key])])
            raise PipelineError(
                f"ranks {missing} did not make their part of the pipeline within {timeout:g} s. Every rank "
                "must call zbcompile.pipeline."
            ) from error
        return self._ask(lambda store: {rank: store.get(key).decode() for rank, key in keys.items()})

    def beat(self, status: Status) -> None:
        """Publish this process's heartbeat and position."""
        self._ask(lambda store: store.set(f"status/{self.rank}", status.text()))

    def statuses(self) -> dict[int, Status]:
        """The latest status of every rank; NEVER for one that has not published any."""
        return self._ask(lambda store: {rank: _status(store, rank) for rank in self.members})

    def status(self, rank: int) -> Status:
        return self._ask(lambda store: _status(store, rank))

    def post(self, region: int, fault: Fault) -> Fault:
        """Post a fault of a region; return the fault that all ranks see, which is the first one posted."""
        return Fault.read(self._ask(lambda store: store.compare_set(f"fault/{region}", "", fault.text())).decode())

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
        """Release the store, so that the process that hosts it can end it. Later calls on the board raise
        RuntimeError, as if the store did not answer."""
        self._store.close()


def _status(store: Any, rank: int) -> Status:
    key = f"status/{rank}"
    return Status.read(store.get(key).decode()) if store.check([key]) else NEVER


def _posted(store: Any, region: int) -> Fault | None:
    for key in (f"fault/{region}", "ended"):
        if store.check([key]):
            return Fault.read(store.get(key).decode())
    return None
