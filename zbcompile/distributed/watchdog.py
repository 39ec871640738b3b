"""The watch over the calls in which ranks depend on each other: when one rank fails, all of them end.

A rank that fails posts its fault in the store. A thread of every rank writes a heartbeat there twice a second and,
while its rank waits, looks for a posted fault; it then cuts the connections of the process group, which makes the wait
raise. A normal step pays for two attribute writes per action, five if the action waits for a message, and for nothing
on the network.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from zbcompile.distributed.channels import Link
from zbcompile.distributed.device_progress import Progress
from zbcompile.distributed.fault_store import Board
from zbcompile.distributed.faults import Fault, Position, Status, find_dead, find_late, find_stray
from zbcompile.distributed.turns import Turns
from zbcompile.errors import PipelineError
from zbcompile.schedules.ir.actions import Action

INTERVAL = 0.5  # seconds between two signs of life
SILENCE = 4 * INTERVAL  # a process that shows none for this long, while a connection is lost, is gone
LEAVING = 3 * INTERVAL  # how long a rank that knows of a fault stays until the other ranks know of it too
STRAY = 3.0  # seconds after which ranks that wait in different calls are not just on their way
UNUSED_TAG = 1 << 30  # no message uses it
Group = dist.ProcessGroup | Link


@dataclass
class Alone:
    """All ranks are in this process: nothing can be lost; a failure names its rank and action."""

    position: Position
    turns: Turns = field(default_factory=lambda: Turns(wait=True))

    @contextlib.contextmanager
    def region(self, doing: str) -> Iterator[None]:
        with self.turns.take(doing):
            self.position.enter(doing)
            try:
                yield
            except Exception as error:
                if isinstance(error, PipelineError) or not isinstance(self.position.action, Action):
                    raise
                raise own_fault(self.position, error).error() from error
            self.position.leave()

    def known_to_all(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        pass


def own_fault(position: Position, error: BaseException) -> Fault:
    """The fault that this rank caused itself."""
    return Fault(position.rank, position.status().where, f"{type(error).__name__}: {error}")


@dataclass
class Watch:
    """This process is one rank of several. `groups` are all those that its pipeline uses, by way of `backend`,
    `inner` those that its graphs use, with ranks of other pipelines; `timeout` is how many seconds it waits for another
    rank, and `progress` says how far its device is."""

    position: Position
    board: Board
    groups: Sequence[Group]
    timeout: float
    backend: str
    progress: Progress
    fault: Fault | None = None
    known: Exception | None = None
    inner: tuple[dist.ProcessGroup, ...] = ()
    stopped: threading.Event = field(default_factory=threading.Event)
    turns: Turns = field(default_factory=lambda: Turns(wait=False))

    def __post_init__(self) -> None:
        self._seen, self._since, self._keeper = self._place(), time.monotonic(), self.position.status()
        self._thread = threading.Thread(target=self._watch, name="zbcompile-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def region(self, doing: str) -> Iterator[None]:
        """Wrap a call that all ranks make: whatever ends it on one rank ends it on all."""
        self._require_open()
        with self.turns.take(doing):
            self.position.enter(doing)
            try:
                yield
            except BaseException as error:
                told = self._explain(error)
                if told is error:
                    raise
                raise told from error
            self.position.leave()
            self.progress.mark()

    def known_to_all(self, error: Exception) -> Exception:
        """`error` is about to be raised, and every other rank raises one for the same reason."""
        self.known = error
        return error

    def close(self) -> None:
        """End the thread and release the store."""
        self.stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * INTERVAL)

    def _require_open(self) -> None:
        remedy = "Call pipe.close(), make a new process group and a new pipeline."
        if self.fault is not None:
            raise PipelineError(f"this pipeline has ended: {self.fault.error()}. {remedy}")
        if self.stopped.is_set():
            raise PipelineError(f"this pipeline is closed, or its process group is destroyed. {remedy}")

    # On the thread that runs the pipeline: what to raise

    def _explain(self, error: BaseException) -> BaseException:
        """The error that this rank raises for `error`. Other ranks learn of it, or this rank learns what happened to
        them."""
        if error is self.known:
            return error
        try:
            return self._tell(error)
        except RuntimeError:  # the store does not answer
            self.fault = self._without_store()
            return self.fault.error()

    def _tell(self, error: BaseException) -> BaseException:
        region = self.position.region
        if self.fault is None and not self._lost_connection(error):
            fault = self.board.post(region, own_fault(self.position, error))
            if not isinstance(self.position.action, Action) or not isinstance(error, Exception):
                self._leave(region)  # nothing of this call was sent: the connections may still be good
                return error
        else:
            fault = self.fault or self.board.post(region, self._find_out(region, error))
        self.fault = fault
        self.board.end(fault)
        for group in self.inner:
            cut_connections(group, self.backend)
        self._leave(region)
        return fault.error()

    def _lost_connection(self, error: BaseException) -> bool:
        """Whether the process group raised `error`: only it raises while a rank waits or communicates."""
        action = self.position.action
        communicates = isinstance(action, Action) and action.op.startswith(("SEND", "RECV"))
        return isinstance(error, RuntimeError) and (self.position.waits or communicates)

    def _find_out(self, region: int, error: BaseException) -> Fault:
        """The fault that broke a connection: one that a rank has posted, or a rank without a heartbeat."""
        before, end = self.board.statuses(), time.monotonic() + SILENCE
        with _not_yet_terminated():
            while time.monotonic() < end:
                posted = self.board.posted(region)
                if posted is not None:
                    return posted
                time.sleep(INTERVAL / 10)
        after = self.board.statuses()
        here = after[self.position.rank]
        cause = f"it lost its connection to the other ranks, which all show signs of life: {error}"
        return find_dead(self.position.rank, before, after) or Fault(self.position.rank, here.where, cause)

    def _leave(self, region: int) -> None:
        """Stay until all ranks know: a launcher that sees one process end kills the other ranks."""
        self.board.leave(region)
        end = time.monotonic() + LEAVING
        while time.monotonic() < end and not self.board.all_left(region):
            time.sleep(INTERVAL / 10)

    def _without_store(self) -> Fault:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Fault(self.position.rank, self.position.status().where, "the launcher, which hosts the store, ended")
        here = self.position.status()
        where = self._keeper.where if self._keeper.region == here.region else here.doing
        return Fault(self.board.members[0], where, "its process ended, and with it the store of the process group")

    # On the watching thread

    def _watch(self) -> None:
        beat, world = 0, dist.group.WORLD
        try:
            while dist.group.WORLD is world:
                beat += 1
                self._look(beat)
                if self.stopped.wait(INTERVAL):
                    break
        except RuntimeError:  # the store does not answer
            if dist.group.WORLD is world and not self.stopped.is_set():
                self._cut(self._without_store())
        self.stopped.set()
        self.board.close()

    def _place(self) -> tuple[object, ...]:
        position = self.position
        return position.region, position.doing, position.action, position.waits, position.waited

    def _look(self, beat: int) -> None:
        """Look at the store once; end this rank's wait if there is a reason to."""
        self.board.beat(self.position.status(beat))
        place = self._place()
        if place != self._seen:
            self._seen, self._since = place, time.monotonic()
        if self.fault is None and (self.position.waits or self.progress.behind() or not self._host_waits):
            self._keeper = self.board.status(self.board.members[0])
            fault = self.board.posted(self.position.region) or self._lose_patience(time.monotonic() - self._since)
            if fault is not None:
                self._cut(fault)

    @property
    def _host_waits(self) -> bool:
        """Whether the host waits. With NCCL the device does: a posted fault then concerns this rank wherever it is."""
        return self.backend == "gloo"

    def _lose_patience(self, waited: float) -> Fault | None:
        if waited < min(STRAY, self.timeout) or not (self.position.waits or self.progress.behind()):
            return None
        rank, statuses = self.position.rank, self.board.statuses()
        fault = find_stray(rank, statuses)
        if fault is None and waited >= self.timeout:
            on_device = not self.position.waits
            fault = self._find_dead(statuses) if on_device else None
            fault = fault or find_late(rank, statuses, self.timeout, on_device)
        return None if fault is None else self.board.post(self.position.region, fault)

    def _find_dead(self, before: dict[int, Status]) -> Fault | None:
        """The rank whose heartbeat has stopped: NCCL does not report that a peer has died."""
        self.stopped.wait(SILENCE)
        after = {rank: status for rank, status in self.board.statuses().items() if before[rank].beat >= 0}
        return find_dead(self.position.rank, before, after)

    def _cut(self, fault: Fault) -> None:
        """End this rank's wait. If its device waits, and no call that could raise, report the fault at once."""
        self.fault = fault
        if not self.position.waits:
            print(f"zbcompile: {fault.error()}", file=sys.stderr, flush=True)
        for group in (*self.groups, *self.inner):
            cut_connections(group, self.backend)


@contextlib.contextmanager
def _not_yet_terminated() -> Iterator[None]:
    """Ignore SIGTERM inside: a launcher that sees one process die sends it to the other ranks at once, and a rank that
    is about to raise for the same reason should first say why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cut_connections(group: Group, backend: str) -> None:
    """Make everything that waits in `group` raise, on this rank; its peers see a closed connection.

    Gloo's `abort` does nothing (2.11-2.13), but a gloo receive that times out closes the connections of the group.
    """
    if backend != "gloo":
        group.abort()
    elif group.size() > 1:
        peer = 1 if group.rank() == 0 else 0
        with contextlib.suppress(RuntimeError, ValueError):
            group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
