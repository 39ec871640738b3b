"""The watch over the calls in which ranks depend on each other: when one rank fails, all of them
end.

A rank that fails reports its fault in the store. A thread of every rank publishes its position
there twice a second and looks for a fault; if there is one, it aborts the process groups, which
makes the wait of its rank raise. A normal step pays for attribute writes only.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.faults.fault_store import FaultStore
from zbcompile.faults.rank_status import Fault, RankStatus, find_straggler, local_fault
from zbcompile.passes import gpu
from zbcompile.schedules.ir.actions import Action

INTERVAL = 0.5  # seconds between two signs of life
# A process that shows none for this long counts as dead once a connection is lost.
SILENCE = 4 * INTERVAL
# How long a rank that knows of a fault stays until the others know: a launcher that sees one
# process end kills the others.
LEAVING = 3 * INTERVAL
ANSWER = 10.0  # seconds for a report to a store that may be frozen


@dataclass(eq=False)
class Watch:
    """The watch of a process that is one rank of several. `groups` are the process groups of its
    pipeline and of its graphs, all of `backend`. `timeout` is the number of seconds after which a
    wait on another rank fails."""

    position: RankStatus
    store: FaultStore
    groups: Sequence[Any]
    timeout: float
    backend: str
    device: torch.device
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self._in_call = False
        self._shared_error: BaseException | None = None
        self._event: Any = None  # behind the work of the last call in the device's stream
        self._beat, self._seen, self._since = 0, self.position.place, time.monotonic()
        self._earlier: dict[int, RankStatus | None] = {}  # read when a wait is nearly too long
        self._store_is_silent = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zbcompile-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="zbcompile-guard", daemon=True).start()

    @contextlib.contextmanager
    def region(self, doing: str) -> Iterator[None]:
        """Context for a call that all ranks make: whatever ends it on one rank ends it on all."""
        remedy = "Call pipe.close(), make a new process group and a new pipeline."
        if self.fault is not None:
            raise PipelineError(f"this pipeline has ended: {self.fault.error()}. {remedy}")
        if self._stopped.is_set():
            raise PipelineError(
                f"this pipeline is closed, or its process group is destroyed. {remedy}"
            )
        self.position.enter(doing)
        before, self._in_call = self._in_call, True
        try:
            yield
            if self.fault is not None:  # this rank has given up, but its wait went on
                raise self.fault.error()
        except BaseException as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._in_call = before
            if not before:
                self._shared_error = None  # its traceback holds what the call held
        self.position.leave()
        if gpu.is_gpu(self.device):
            self._event = gpu.Event()
            self._event.record(gpu.current_stream(self.device))

    @contextlib.contextmanager
    def outside_calls(self, what: str) -> Iterator[None]:
        """Context for a wait outside of a call, for something that all ranks have begun."""
        if self._in_call:
            yield
            return
        try:
            with self.position.waiting(what):
                yield
        except BaseException as error:
            raise self._explain(error) from error

    def on_all_ranks(self, error: Exception) -> Exception:
        """Notes that every other rank raises an error for the same reason as `error`."""
        self._shared_error = error
        return error

    def close(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * INTERVAL)

    # On the thread that runs the pipeline: what to raise

    def _explain(self, error: BaseException) -> BaseException:
        """Returns the error that this rank raises for `error`, once the others know of it, or this
        one knows what happened to them."""
        if error is self._shared_error:
            self.position.waits = False
            return error
        explained: list[BaseException] = []
        thread = threading.Thread(
            target=lambda: explained.append(self._report(error)),
            name="zbcompile-report",
            daemon=True,
        )
        thread.start()
        end = time.monotonic() + ANSWER
        while thread.is_alive() and time.monotonic() < end and not self._store_is_silent:
            thread.join(INTERVAL)
        self.position.waits = False
        if not explained:  # the store is frozen
            self.fault = self.fault or self._store_fault()
            return self.fault.error()
        return explained[0]

    def _report(self, error: BaseException) -> BaseException:
        """Reports a fault to the other ranks, or finds theirs. Returns the error to raise."""
        try:
            region, action = self.position.region, self.position.action
            if self.fault is not None or self._lost_connection(error):
                fault = self.fault or self.store.report(region, self._find_cause(region, error))
            else:
                fault = self.store.report(region, local_fault(self.position, error))
                if not isinstance(action, Action) or not isinstance(error, Exception):
                    self._leave(region)  # no message was sent: the connections are good
                    return error
            self.fault = fault
            self.store.end(fault)
            self._leave(region)
            return fault.error()
        except RuntimeError:  # the store is gone
            if self.fault is None and not self._lost_connection(error):
                return error
            self.fault = self.fault or self._store_fault()
            return self.fault.error()

    def _lost_connection(self, error: BaseException) -> bool:
        """Returns whether a process group raised `error`. Nothing else raises while a rank waits or
        communicates."""
        action = self.position.action
        communicates = isinstance(action, Action) and action.op.startswith(("SEND", "RECV"))
        return isinstance(error, RuntimeError) and (self.position.waits or communicates)

    def _find_cause(self, region: int, error: BaseException) -> Fault:
        """Returns the fault that broke a connection: a reported one, or a rank without signs of
        life."""
        local, statuses = self.position, self.store.statuses()
        end = time.monotonic() + SILENCE + INTERVAL
        while time.monotonic() < end:
            fault = self.store.get_fault(region)
            if fault is not None:
                return fault
            time.sleep(INTERVAL / 10)
        cause = (
            f"rank {local.rank} lost its connection to the other ranks, which all show signs of"
            f" life: {error}"
        )
        return self._silent_rank(statuses) or Fault(None, local.where, cause)

    def _silent_rank(self, earlier: dict[int, RankStatus | None]) -> Fault | None:
        """Returns the fault of a rank that has shown no sign of life since `earlier`."""
        local = self.position
        for rank, status in self.store.statuses().items():
            before = earlier.get(rank)
            if rank != local.rank and status and before and status.beat == before.beat:
                return Fault(
                    rank,
                    status.where if status.region == local.region else local.doing,
                    "its process ended or is frozen, or its machine was lost. Its last sign of life"
                    f" came from {status.where}; rank {local.rank} missed it at {local.where}",
                )
        return None

    def _leave(self, region: int) -> None:
        """Waits until all ranks know of a fault, for at most `LEAVING` seconds."""
        self.store.acknowledge(region)
        end = time.monotonic() + LEAVING
        while time.monotonic() < end and not self.store.acknowledge(region, 0):
            time.sleep(INTERVAL / 10)

    def _store_fault(self) -> Fault:
        lost = (
            f"ended, is frozen, or cannot be reached from rank {self.position.rank}; it hosts the"
            " store of the process group"
        )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Fault(None, self.position.where, f"the launcher {lost}")
        return Fault(self.store.members[0], self.position.doing, f"its process {lost}")

    # On the watching threads

    def _guard(self) -> None:
        """Ends the wait of this rank if the store has not answered for `timeout` seconds: its host
        is frozen, and calls of the store wait without a limit."""
        silent, beat = 0.0, self._beat
        while silent <= self.timeout:
            if self._stopped.wait(INTERVAL):
                return
            silent, beat = silent + INTERVAL if beat == self._beat else 0.0, self._beat
        self._store_is_silent = True
        self._abort(self.fault or self._store_fault())

    def _watch(self) -> None:
        world = dist.group.WORLD
        try:
            while dist.group.WORLD is world and not self._stopped.is_set():
                self._look()
                self._stopped.wait(INTERVAL)
        except RuntimeError:  # the store is gone
            if dist.group.WORLD is world and not self._stopped.is_set():
                self._abort(self._store_fault())
        self._stopped.set()

    def _look(self) -> None:
        """Publishes this rank's position; ends its wait if there is a fault, or it has waited for
        `timeout` seconds. With NCCL the device waits, not the host."""
        position, device_waits = self.position, self._device_waits()
        if position.place != self._seen:
            self._seen, self._since, self._earlier = position.place, time.monotonic(), {}
        self._beat += 1
        self.store.publish(replace(position, action=str(position.action), beat=self._beat))
        if self.fault is not None:
            return
        waits = position.waits or device_waits
        communicates = waits or isinstance(position.action, Action)
        fault = self.store.get_fault(position.region) if communicates else None
        waited = time.monotonic() - self._since - INTERVAL if waits else 0.0
        if not self._earlier and waited > self.timeout - SILENCE:
            self._earlier = self.store.statuses()
        if fault is None and waited > self.timeout:
            statuses = self.store.statuses()
            fault = find_straggler(position, statuses, self.timeout, not position.waits)
            if fault.rank is None:  # a rank that is frozen in a wait still seems to wait
                fault = self._silent_rank(self._earlier) or fault
            fault = self.store.report(position.region, fault)
        if fault is not None:
            self._abort(fault)

    def _device_waits(self) -> bool:
        """Returns whether the device still executes the last call, which has returned on the
        host."""
        if self._event is None:
            return False
        with contextlib.suppress(RuntimeError), gpu.as_current(self.device):
            return not self._event.query()
        return False  # the device has failed: its next use says why

    def _abort(self, fault: Fault) -> None:
        """Aborts the communication of this rank. If the device is still busy, there may be no call
        to raise the fault, so it is printed."""
        self.fault = fault
        if self._device_waits():
            print(f"zbcompile: {fault.error()}", file=sys.stderr, flush=True)
        while True:  # again while the call goes on: it may just not have waited
            for group in self.groups:
                abort_group(group, self.backend)
            if self.backend != "gloo" or not self._in_call or self._stopped.wait(INTERVAL):
                return


UNUSED_TAG = 1 << 30  # no message uses it


def abort_group(group: Any, backend: str) -> None:
    """Makes everything that waits in `group` raise on this rank; its peers see a closed connection.

    `group` is a process group of torch or one of its backends. gloo's `abort` does nothing (torch
    2.11 to 2.13). But a gloo receive that times out closes all connections of the group if the one
    that it uses is still open, so this tries a receive from each peer.
    """
    if "gloo" not in (backend, group.name()):
        group.abort()
        return
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError, ValueError):
            group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
