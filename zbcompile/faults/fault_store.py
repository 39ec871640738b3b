"""Status and fault records in the process group's store. Usable while collectives are broken."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbcompile.faults.rank_status import Fault, RankStatus

ANSWER = timedelta(seconds=3)  # for the answer of the store


class FaultStore:
    """The status and fault records of one pipeline. They use a separate connection, which a blocked
    call on the group's connection does not block. All methods raise RuntimeError if the store is
    gone. `rank` is this process's among the global ranks `members`."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], rank: int) -> None:
        self.members, self.rank = tuple(members), rank
        shared: Any = group.get_group_store()  # `clone` is missing in torch's type stubs (2.13)
        # Every rank makes its pipelines in the same order.
        name = f"zbcompile/{shared.add(f'zbcompile/made/{rank}', 1)}"
        self._group_store = dist.PrefixStore(name, shared)
        self._store = dist.PrefixStore(name, shared.clone())
        self._store.set_timeout(ANSWER)

    def channel_store(self, group: dist.ProcessGroup) -> dist.Store:
        """Returns a rendezvous store for the ranks of `group`, which no other pipeline uses."""
        first = dist.get_process_group_ranks(group)[0]
        return dist.PrefixStore(f"channels/{first}", self._group_store)

    def all_gather(self, key: str, value: str) -> dict[int, str]:
        """Returns what every rank passed for `key`, by rank. Blocks until all have called it, for
        at most the timeout of the process group."""
        self._group_store.set(f"{key}/{self.rank}", value)
        return {rank: self._group_store.get(f"{key}/{rank}").decode() for rank in self.members}

    def publish(self, status: RankStatus) -> None:
        self._store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def statuses(self) -> dict[int, RankStatus | None]:
        """Returns the latest status of every rank; None for one that has published none."""
        return {
            rank: RankStatus(**json.loads(self._store.get(f"status/{rank}")))
            if self._store.check([f"status/{rank}"])
            else None
            for rank in self.members
        }

    def report(self, region: int, fault: Fault) -> Fault:
        """Reports a fault in a call. Returns the first one that was reported, which all see."""
        text = self._store.compare_set(f"fault/{region}", "", json.dumps(asdict(fault)))
        return Fault(**json.loads(text))

    def get_fault(self, region: int) -> Fault | None:
        """Returns the fault of a call, or the one that ended the pipeline."""
        for key in (f"fault/{region}", "ended"):
            if self._store.check([key]):
                return Fault(**json.loads(self._store.get(key)))
        return None

    def end(self, fault: Fault) -> None:
        """Records that the pipeline has ended."""
        self._store.set("ended", json.dumps(asdict(fault)))

    def acknowledge(self, region: int, ranks: int = 1) -> bool:
        """Records that this rank (0: none) knows the fault of a call. Returns whether all do."""
        return self._store.add(f"known/{region}", ranks) >= len(self.members)
