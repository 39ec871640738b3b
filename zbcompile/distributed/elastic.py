"""A fresh start under torchrun: its agent keeps one store for all restarts, with the keys of ranks that have ended,
and the nodes of a job do not count restarts alike. So the ranks that are there now find each other by new names."""

import hashlib
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PAUSE = 0.05  # seconds between two looks at the store
ROUND = timedelta(seconds=1)  # for all to have seen the same list


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout: float) -> dist.Store:
    """The part of `store` that the ranks of this start share with no earlier one. Raises RuntimeError if one is
    missing after `timeout` seconds.

    Every rank announces a name that nobody had before. Rank 0 lists those that it sees; a list counts once every rank
    has found its name in it, which those of an earlier start cannot.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(_member(rank), own)
    while time.monotonic() < end:
        if rank == 0 and store.check([_member(other) for other in range(ranks)]):
            store.set("zbcompile/starting", ",".join(store.get(_member(other)).decode() for other in range(ranks)))
        names = store.get("zbcompile/starting").decode() if store.check(["zbcompile/starting"]) else ""
        if own in names:
            start = f"zbcompile/start-{hashlib.sha256(names.encode()).hexdigest()}"
            store.set(f"{start}/{rank}", "here")
            if _all_came(store, [f"{start}/{other}" for other in range(ranks)]):
                return dist.PrefixStore(start, store)
        time.sleep(PAUSE)
    raise RuntimeError(f"not all of the {ranks} ranks arrived within {timeout:g} s")


def _member(rank: int) -> str:
    return f"zbcompile/member/{rank}"


def _all_came(store: dist.Store, keys: list[str]) -> bool:
    try:
        store.wait(keys, ROUND)
    except RuntimeError:
        return False
    return True
