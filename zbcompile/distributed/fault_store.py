"""Out-of-band rank status and faults, kept in the process group's store.

It works when messages do not: a rank that failed, or one whose peer is gone, can still write to it and read from it.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.faults import NEVER, Fault, Status
from zbcompile.errors import PipelineError


class _Closed:
    """Stand-in for a closed store: the watchdog may close it while another thread still explains a fault."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store of the process group is closed")


class Board:
    """One pipeline's keys in the store of its process group, over a connection of its own (a blocked call on the
    group's own connection must not keep the watchdog from reading)."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], rank: int) -> None:
        self.members = tuple(members)
        self.rank = rank
        shared: Any = group.get_group_store()  # `clone` is missing in torch's type stubs (2.13)
        store = shared.clone()
        serial = store.add(f"zbcompile/made/{rank}", 1)  # every rank makes its pipelines in the same order
        self._name = f"zbcompile/{serial}"
        self._store: Any = dist.PrefixStore(self._name, store)

    def private_store(self, group: dist.ProcessGroup) -> dist.Store:
        """A place for the ranks of `group` to meet, which they share with no other group or pipeline."""
        first = dist.get_process_group_ranks(group)[0]
        return dist.PrefixStore(f"{self._name}/channels/{first}", group.get_group_store())

    def exchange(self, what: str, value: str, timeout: float) -> dict[int, str]:
        """What every rank says about `what`, once they all have. Raises PipelineError after `timeout` seconds."""
        keys = {rank: f"{what}/{rank}" for rank in self.members}
        self._store.set(keys[self.rank], value)
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout))
        except RuntimeError as error:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise PipelineError(
                f"ranks {missing} did not come within {timeout:g} s to make their part of the pipeline. Every rank "
                "must call zbcompile.pipeline."
            ) from error
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    def beat(self, status: Status) -> None:
        """Show that this process lives, and where it is."""
        self._store.set(f"status/{self.rank}", status.text())

    def statuses(self) -> dict[int, Status]:
        """The latest of every rank; NEVER for one that has not been here."""
        return {rank: self.status(rank) for rank in self.members}

    def status(self, rank: int) -> Status:
        key = f"status/{rank}"
        return Status.read(self._store.get(key).decode()) if self._store.check([key]) else NEVER

    def post(self, region: int, fault: Fault) -> Fault:
        """Post a fault of a region. The first one stays: the result is the one that all ranks see."""
        return Fault.read(self._store.compare_set(f"fault/{region}", "", fault.text()).decode())

    def posted(self, region: int) -> Fault | None:
        """The fault of a region, or the one that ended the process group's connections for good."""
        for key in (f"fault/{region}", "ended"):
            if self._store.check([key]):
                return Fault.read(self._store.get(key).decode())
        return None

    def end(self, fault: Fault) -> None:
        """Nothing can be sent any more, because of `fault`."""
        self._store.set("ended", fault.text())

    def leave(self, region: int) -> None:
        """This rank has learnt of the fault of a region."""
        self._store.add(f"left/{region}", 1)

    def all_left(self, region: int) -> bool:
        """Have all ranks?"""
        return self._store.add(f"left/{region}", 0) >= len(self.members)

    def close(self) -> None:
        """Let go of the store: a process that keeps it can then end it. What is asked of the board from then on raises
        RuntimeError, as of a store that does not answer."""
        self._store = _Closed()
