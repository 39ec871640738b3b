"""The watch over the calls in which ranks depend on each other: when one rank fails, all of them
end.

A rank that fails posts its fault in the store. A thread of every rank writes a heartbeat there
twice a second and, while its rank waits, looks for a posted fault; it then cuts the connections of
the process group, which makes the wait raise. A normal step pays for two attribute writes per
action, five if the action waits for a message, and for nothing on the network.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.faults.abort import Group, cut_connections
from zbcompile.faults.board import Board, SilentStoreError
from zbcompile.faults.device_progress import DeviceProgress
from zbcompile.faults.fault_report import (
    Fault,
    Heartbeats,
    Position,
    Status,
    find_gone,
    find_late,
    find_stray,
)
from zbcompile.schedules.ir.actions import Action

INTERVAL = 0.5  # seconds between two signs of life
# a process that shows none for this long counts as gone once a connection is lost
SILENCE = 4 * INTERVAL
# how long a rank that knows of a fault stays until the other ranks know of it too
LEAVING = 3 * INTERVAL
STRAY = 3.0  # seconds after which ranks that wait in different calls are at fault, not just late


@dataclass
class LocalWatch:
    """All ranks are in this process: nothing can be lost; a failure names its rank and action."""

    position: Position
    fault: None = None
    known: Exception | None = None

    @contextlib.contextmanager
    def region(self, doing: str) -> Iterator[None]:
        self.position.enter(doing)
        try:
            yield
        except Exception as error:
            if isinstance(error, PipelineError) or not isinstance(self.position.action, Action):
                raise
            raise own_fault(self.position, error).error() from error
        finally:
            self.known = None  # its traceback holds what the call held
        self.position.leave()

    def apart(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def known_to_all(self, error: Exception) -> Exception:
        self.known = error
        return error

    def close(self) -> None:
        pass


def own_fault(position: Position, error: BaseException) -> Fault:
    """The fault that this rank caused itself."""
    return Fault(position.rank, position.status().where, f"{type(error).__name__}: {error}")


def _after(what: str) -> str:
    """What ended a rank, with the error of its script before that, if there was one."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return (
        what
        if error is None
        else f"{what}, after {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    )


@dataclass(eq=False)
class Watch:
    """This process is one rank of several. `groups` are the process groups of its pipeline, all of
    `backend`; `inner` are those that its graphs use together with ranks of other pipelines.
    `timeout` is how many seconds it waits for another rank, and `progress` says how far its device
    is. `inside` says whether it runs a call now; `heard` is a fault that was posted, and `closed`
    says how the pipeline was closed."""

    position: Position
    board: Board
    groups: Sequence[Group]
    timeout: float
    backend: str
    progress: DeviceProgress
    fault: Fault | None = None
    known: Exception | None = None
    inner: tuple[dist.ProcessGroup, ...] = ()
    inside: bool = False
    heard: Fault | None = None
    closed: str = ""
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._seen, self._since = self._place(), time.monotonic()
        self._beats, self._heard_here = itertools.count(1), dict[int, int]()
        self._thread = threading.Thread(target=self._watch, name="zbcompile-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def region(self, doing: str) -> Iterator[None]:
        """Wrap a call that all ranks make: whatever ends it on one rank ends it on all."""
        self._require_open()
        self.position.enter(doing)
        before, self.inside = self.inside, True
        try:
            yield
            if (
                self.fault is not None
            ):  # this rank has given up, but what it waited in could not be cut
                raise self.fault.error()
        except BaseException as error:
            told = self._explain(error)
            if told is error:
                raise
            raise told from error
        finally:
            self.inside = before
            if not before:
                self.known = None  # its traceback holds what the call held
        self.position.leave()
        self.progress.mark()

    @contextlib.contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Wrap a wait for something that all ranks have begun together, but each may wait for at
        another place."""
        if self.inside:
            yield
            return
        try:
            with self.position.waiting(what):
                yield
        except BaseException as error:
            raise self._explain(error) from error

    def known_to_all(self, error: Exception) -> Exception:
        """`error` is about to be raised, and every other rank raises one for the same reason."""
        self.known = error
        return error

    def close(self) -> None:
        """End the thread and release the store."""
        self.closed = self.closed or _after("it closed its pipeline")
        self.stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * INTERVAL)

    def _require_open(self) -> None:
        remedy = "Call pipe.close(), make a new process group and a new pipeline."
        if self.fault is not None:
            raise PipelineError(f"this pipeline has ended: {self.fault.error()}. {remedy}")
        if self.stopped.is_set():
            raise PipelineError(
                f"this pipeline is closed, or its process group is destroyed. {remedy}"
            )

    # On the thread that runs the pipeline: what to raise

    def _explain(self, error: BaseException) -> BaseException:
        """The error that this rank raises for `error`. Others learn of it, or it learns what
        happened to them."""
        try:
            return error if error is self.known else self._tell_others(error)
        finally:
            # whoever catches it may go on, and other pipelines use the same connections
            self.position.waits = False

    def _tell_others(self, error: BaseException) -> BaseException:
        try:
            return self._tell(error)
        except RuntimeError:  # the store does not answer
            if self.fault is None and not self._lost_connection(error):
                return error
            self.fault = self.fault or self._without_store()
            return self.fault.error()

    def _tell(self, error: BaseException) -> BaseException:
        region = self.position.region
        if self.fault is None and not self._lost_connection(error):
            fault = self.board.post(region, own_fault(self.position, error))
            if not isinstance(self.position.action, Action) or not isinstance(error, Exception):
                self._leave(
                    region
                )  # nothing of this call was sent: the connections may still be good
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
        """Whether the process group raised `error`: only it raises while a rank waits or
        communicates."""
        action = self.position.action
        communicates = isinstance(action, Action) and action.op.startswith(("SEND", "RECV"))
        return isinstance(error, RuntimeError) and (self.position.waits or communicates)

    def _find_out(self, region: int, error: BaseException) -> Fault:
        """The fault that broke a connection: one that a rank has posted, or a rank that has
        gone."""
        rank, end = self.position.rank, math.inf
        last = False
        while not last:
            # on a busy machine time passes between looks: one more decides
            last = time.monotonic() >= end
            fault = self.board.posted(region) or self._find_gone(self.board.statuses())
            if fault is not None:
                return fault
            end = min(end, time.monotonic() + SILENCE + INTERVAL)
            time.sleep(INTERVAL / 10)
        cause = (
            f"rank {rank} lost its connection to the other ranks, which all show signs of life:"
            f" {error}"
        )
        return Fault(None, self.position.status().where, cause)

    def _find_gone(self, statuses: dict[int, Status]) -> Fault | None:
        self.heartbeats.note(statuses)
        return find_gone(self.position.rank, statuses, self.heartbeats, SILENCE)

    def _leave(self, region: int) -> None:
        """Stay until all ranks know: a launcher that sees one process end kills the other ranks."""
        self.board.leave(region)
        end = time.monotonic() + LEAVING
        while time.monotonic() < end and not self.board.all_left(region):
            time.sleep(INTERVAL / 10)

    def _without_store(self) -> Fault:
        if self.heard is not None:
            return self.heard
        here, rank = self.position.status(), self.position.rank
        lost = (
            f"ended, is frozen, or cannot be reached from rank {rank}; it hosts the store of the"
            " process group"
        )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Fault(None, here.where, f"the launcher at {self.board.address} {lost}")
        return Fault(self.board.members[0], here.doing, f"its process {lost}")

    # On the watching thread

    def _watch(self) -> None:
        world = dist.group.WORLD
        try:
            while dist.group.WORLD is world:
                self._look_patiently()
                if self.stopped.wait(INTERVAL):
                    break
            if self.fault is None:
                ended = self.closed or _after("its process or its process group ended")
                self.board.beat(self.position.status(next(self._beats), self.timeout, ended))
        except RuntimeError:  # the store does not answer
            if dist.group.WORLD is world and not self.stopped.is_set():
                self._cut(self._without_store())
        self.stopped.set()
        self.board.close()

    def _look_patiently(self) -> None:
        """A store that does not answer may do so later; it is given up once this rank has waited
        long enough."""
        try:
            self._look()
        except SilentStoreError:
            if self._waited() >= self.timeout:
                self.board.cut()
                raise

    def _place(self) -> tuple[object, ...]:
        position = self.position
        return position.region, position.doing, position.action, position.waits, position.waited

    def _waited(self) -> float:
        """How many seconds this rank has waited at its place."""
        place = self._place()
        if place != self._seen:
            self._seen, self._since, self._heard_here = place, time.monotonic(), {}
        return (
            time.monotonic() - self._since if self.position.waits or self.progress.behind() else 0.0
        )

    def _look(self) -> None:
        """Look at the store once; end this rank's wait if there is a reason to. With NCCL the
        device waits, not the host: then a posted fault concerns this rank wherever its host is."""
        waited = self._waited()
        self.board.beat(self.position.status(next(self._beats), self.timeout))
        self.heard = self.board.posted(self.position.region)
        if self.fault is None and (
            self.position.waits or self.progress.behind() or self.backend != "gloo"
        ):
            fault = self.heard or self._lose_patience(waited)
            if fault is not None:
                self._cut(fault)

    def _lose_patience(self, waited: float) -> Fault | None:
        waits, behind = self.position.waits, self.progress.behind()
        if not (waits or behind) or waited < min(STRAY, self.timeout - SILENCE):
            return None
        rank, statuses = self.position.rank, self.board.statuses()
        gone = self._find_gone(statuses)  # notes the heartbeats, some time before they decide
        fault = (
            find_stray(rank, statuses, self._heard_here)
            if waited >= min(STRAY, self.timeout)
            else None
        )
        for other, status in statuses.items():
            self._heard_here.setdefault(other, status.beat)
        if waited >= self.timeout + INTERVAL:
            fault = fault or gone or find_late(rank, statuses, self.timeout, not waits)
        return None if fault is None else self.board.post(self.position.region, fault)

    def _cut(self, fault: Fault) -> None:
        """End this rank's wait. If its device waits, no call may be there to raise the fault, so
        report it at once."""
        self.fault = fault
        if self.progress.behind():
            print(f"zbcompile: {fault.error()}", file=sys.stderr, flush=True)
        for group in (*self.groups, *self.inner):
            cut_connections(group, self.backend)
