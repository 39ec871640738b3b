"""How the processes of a job meet. Until they have, there is no process group by which they could
watch each other: the store that one of them, or the launcher, keeps is all that they have.

Under torchrun the agent keeps one store for all restarts, with the names of ranks that have ended,
and the nodes of a job do not count restarts alike. So the ranks that are there now find each other
by new names.
"""

import contextlib
import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.mesh import patience
from zbcompile.errors import PipelineError
from zbcompile.faults.abort import cut_connections_to
from zbcompile.faults.board import ANSWER, GRACE
from zbcompile.torch_private import gloo_link

INTERFACE = "GLOO_SOCKET_IFNAME"  # the environment variable that names gloo's network interface
GLOO_TRIES = 5  # to connect; each may take the whole timeout of the group
PAUSE = 0.05  # seconds between two looks at the store
NEWS = 1.0  # seconds between two looks at who is absent
MEMBERS, STARTING, GAVE_UP = "zbcompile/members", "zbcompile/starting", "zbcompile/gave up"  # keys


class Rendezvous:
    """This process, `rank` of `ranks`, on its way to the other ranks of its job, for at most
    `timeout` seconds. `absent` says which of them are not there, as far as this one knows."""

    def __init__(self, environment: Mapping[str, str], timeout: float) -> None:
        self.rank, self.ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.host, self.port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        # keeps the store, else rank 0 does
        self.launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.timeout, self.began, self.name = timeout, time.monotonic(), uuid.uuid4().hex[:16]
        self.absent = f"the launcher at {self.host}:{self.port} does not answer"
        if not self.launcher:
            self.absent = (
                f"rank 0, which keeps the store at {self.host}:{self.port}, did not arrive, or has"
                " ended"
            )
        self._over = threading.Event()

    def join(self, backend: str) -> None:
        """Make the process group of all ranks. Raises PipelineError if that takes longer than
        `timeout`."""
        try:
            with self._watched():
                store = self.meet(self._store())
                self.absent = ""
                self._connect(store, backend)
        except (RuntimeError, OSError) as error:
            raise PipelineError(self.failure(str(error))) from error

    def failure(self, error: str) -> str:
        """Why there is no process group, and what to do."""
        waited = f"{time.monotonic() - self.began:.0f} s (timeout={self.timeout:g})"
        why = "; ".join(
            dict.fromkeys(each for each in (self.absent, error.partition("\n")[0]) if each)
        )
        return (
            f"rank {self.rank} of {self.ranks} found no process group after {waited}: {why}. Start"
            " all processes, with the same MASTER_ADDR and MASTER_PORT, on machines that reach"
            f" each other by {os.environ.get(INTERFACE, 'the address of their host name')} (set"
            f" {INTERFACE} to the interface; `ip address` shows them), or give them more timeout=."
        )

    @property
    def left(self) -> float:
        """Seconds until this rank gives up."""
        return self.began + self.timeout - time.monotonic()

    def _store(self) -> dist.Store:
        """The store in which the ranks meet, once its keeper is there."""
        keeps = self.rank == 0 and not self.launcher
        while not (keeps or self._answers()):
            if self.left <= 0:
                raise RuntimeError(self.absent)
            time.sleep(PAUSE)
        rest = timedelta(seconds=max(NEWS, self.left))
        return dist.TCPStore(
            self.host,
            self.port,
            None,
            keeps,
            timeout=rest,
            wait_for_workers=False,
            multi_tenant=not self.launcher,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), NEWS):
            return True
        return False

    def meet(self, store: Any) -> dist.Store:
        """The part of `store` that the ranks of this start share with no earlier one, once all have
        come. Raises RuntimeError if one is missing when the time is over.

        Every rank adds a name that was never used before. Rank 0 lists the last name of every rank;
        a list counts once every rank has found its name in it, which those of an earlier start
        cannot.
        """
        store.append(MEMBERS, f"{self.rank}:{self.name},")
        looked, start = 0.0, ""
        while True:
            looks = time.monotonic() - looked >= NEWS or self.left <= 0
            members = _members(store) if self.rank == 0 or looks else {}
            if self.rank == 0 and members.keys() >= set(
                range(self.ranks)
            ):  # more came to an earlier start
                store.set(STARTING, ",".join(members[rank] for rank in range(self.ranks)))
            names = _read(store, STARTING)
            here: set[int] = set()
            if self.name in names:
                before, start = (
                    start,
                    f"zbcompile/start-{hashlib.sha256(names.encode()).hexdigest()}",
                )
                if start != before:
                    store.append(f"{start}/here", f"{self.rank},")
                here = {int(rank) for rank in _read(store, f"{start}/here").split(",") if rank}
                if len(here) == self.ranks:
                    return dist.PrefixStore(start, store)
            if looks:
                looked, self.absent = time.monotonic(), self._who_is_absent(store, members, here)
            if self.left <= 0:
                if not _who_gave_up(store, members):
                    store.set(GAVE_UP, f"{self.rank}:{self.name}:{self.absent}")
                raise RuntimeError(self.absent)
            time.sleep(PAUSE)

    def _who_is_absent(self, store: dist.Store, members: Mapping[int, str], here: set[int]) -> str:
        if gave_up := _who_gave_up(store, members):
            return gave_up
        missing = set(range(self.ranks)) - members.keys()
        if not missing:  # all have come, but some may have done so in an earlier start
            missing = set(range(self.ranks)) - here if here else {0}
        numbers = ", ".join(map(str, sorted(missing)))
        return f"rank{'s' if len(missing) > 1 else ''} {numbers} did not arrive"

    def _connect(self, store: dist.Store, backend: str) -> None:
        """Make the group. What is received in it waits as long as the group may take to connect, in
        each of gloo's tries: so another one, which may take less, shows first that all ranks reach
        each other."""
        rest = timedelta(seconds=max(ANSWER, self.left))
        store.set_timeout(rest)
        if backend == "gloo":
            reached = gloo_link(
                dist.PrefixStore("reached", store), self.rank, rest / GLOO_TRIES, self.ranks
            )
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=patience(backend, self.timeout),
        )
        if backend == "gloo":
            del reached  # not before: others may still connect

    # While this process waits inside torch

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, this process waits for no store that does not answer."""

        def watch() -> None:
            while not self._over.wait(GRACE):
                if self.left < -ANSWER:
                    cut_connections_to(self.port)

        threading.Thread(target=watch, name="zbcompile-arrival", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()


def _members(store: dist.Store) -> dict[int, str]:
    """The last name of every rank that ever came to the store."""
    entries = (entry.split(":") for entry in _read(store, MEMBERS).split(",") if entry)
    return {int(rank): name for rank, name in entries}


def _who_gave_up(store: dist.Store, members: Mapping[int, str]) -> str:
    """The first rank of this start that waits no longer, and why; empty if there is none."""
    rank, _, rest = _read(store, GAVE_UP).partition(":")
    name, _, why = rest.partition(":")
    return f"rank {rank} has given up: {why}" if name and members.get(int(rank)) == name else ""


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
