"""The recorder of the steps of a pipeline.

The record of a step says when each action ran on each rank, what waited and was sent, and why ranks
were idle.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import GroupRanks, Ranks
from zbcompile.passes import gpu
from zbcompile.program.program import Program
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import Action

ROUNDS = 10  # of a ping; the fastest one counts


class Clock:
    """`mark` records the current time without waiting for the device; `seconds` returns it later,
    on this host's clock. This one is for devices that work while the host waits."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        return float(mark)


class DeviceClock(Clock):
    """A clock of CUDA events in the stream. The host blocks only when it reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpu.synchronize(device)
        self._base, self._zero = self.mark(), time.perf_counter()

    def mark(self) -> gpu.Event:
        event = gpu.Event(enable_timing=True)
        event.record(gpu.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return self._zero + self._base.elapsed_time(mark) / 1e3


def offset_to_first(group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the seconds by which this host's clock is ahead of that of the group's first rank.
    All ranks must call it.

    The first rank asks each in turn for its time. Half of the fastest round trip is the error that
    can remain.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ahead = torch.zeros(size, dtype=torch.float64, device=device)
    message = torch.zeros((), dtype=torch.float64, device=device)
    for peer in range(1, size):
        trips = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            if rank == 0:
                dist.send(message, group=group, group_dst=peer)
                dist.recv(message, group=group, group_src=peer)
                its_time, now = float(message), time.perf_counter()
                trips.append((now - start, its_time - (start + now) / 2))
            elif rank == peer:
                dist.recv(message, group=group, group_src=0)
                message.item()  # a GPU receives while its host goes on
                dist.send(message.fill_(time.perf_counter()), group=group, group_dst=0)
        if trips:
            ahead[peer] = min(trips)[1]
    dist.broadcast(ahead, group=group, group_src=0)
    return float(ahead[rank])


@dataclass
class ProcessRecord:
    """The recorded actions of one process's ranks, on a clock that all ranks share."""

    begin: float
    end: float
    timed: dict[int, list[RecordedSpan]]
    live_bytes: dict[int, list[int]]
    sent: dict[int, int]


@dataclass
class ActionTimes:
    """The actions of the ranks in this process during one step.

    `marks` are the begin and end of each, `live_bytes` the bytes of activations after it,
    `sent` the bytes that each rank has sent.
    """

    program: Program
    schedule: Schedule
    clock: Clock = field(default_factory=Clock)
    started: float = field(default_factory=time.perf_counter)
    marks: defaultdict[int, list[tuple[Action, Any, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    live_bytes: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    running: dict[tuple[int, Action], Any] = field(default_factory=dict)

    def begin(self, action: Action, rank: int) -> None:
        """Records the begin of an action."""
        self.running[rank, action] = self.clock.mark()

    def end(self, action: Action, rank: int, live_bytes: int) -> None:
        """Records the end of an action, behind which the rank holds `live_bytes` bytes."""
        self.marks[rank].append((action, self.running.pop((rank, action)), self.clock.mark()))
        self.live_bytes[rank].append(live_bytes)

    def record(self, ahead: float = 0.0) -> ProcessRecord:
        """Returns the record. This process's clock is `ahead` seconds of that of the first rank.
        Synchronizes with the device."""

        def at(mark: Any) -> float:
            return self.clock.seconds(mark) - ahead

        timed = {
            rank: [RecordedSpan(str(action), at(begin), at(end)) for action, begin, end in marks]
            for rank, marks in self.marks.items()
        }
        end = time.perf_counter() - ahead
        sent = {rank: self.sent[rank] for rank in timed}
        return ProcessRecord(self.started - ahead, end, timed, dict(self.live_bytes), sent)


def make_record(times: ActionTimes, parts: Sequence[ProcessRecord], in_process: bool) -> StepRecord:
    """Returns one record of the records of all processes, on one clock."""
    started = min(part.begin for part in parts)
    timed = _merged([part.timed for part in parts])
    spans = {
        r: [RecordedSpan(a, s - started, e - started) for a, s, e in spans]
        for r, spans in timed.items()
    }
    return StepRecord(
        spans=spans,
        held_bytes=_merged([part.live_bytes for part in parts]),
        bytes_sent=_merged([part.sent for part in parts]),
        step_time=max(part.end for part in parts) - started,
        started=started,
        in_process=in_process,
        schedule=times.schedule,
        program=times.program.manifest,
    )


def _merged(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    return dict(sorted((rank, spans) for part in parts for rank, spans in part.items()))


class Observation:
    """Records the steps of `ranks` while `record` is set. `last_step` is the record of the last
    one, if it was recorded."""

    def __init__(self, ranks: Ranks) -> None:
        self.record = False
        self.last_step: StepRecord | None = None
        self._ranks = ranks
        # seconds by which this host's clock is ahead of the first rank's
        self._ahead: float | None = None
        self._times: ActionTimes | None = None
        self._records: list[StepRecord] | None = None

    def begin(self, program: Program, schedule: Schedule) -> ActionTimes:
        """Starts to record a step, after a barrier of all ranks, whose clocks are compared once."""
        ranks = self._ranks
        if isinstance(ranks, GroupRanks):
            with ranks.watch.position.waiting("the common start"):
                if self._ahead is None:
                    self._ahead = offset_to_first(ranks.everyone, ranks.device)
                dist.barrier(ranks.group)
        clock = DeviceClock(ranks.device) if gpu.is_gpu(ranks.device) else Clock()
        self._times = ActionTimes(program, schedule, clock)
        return self._times

    def end(self) -> None:
        """Sets `last_step` to the record of all ranks of the pipeline, on every rank."""
        assert self._times is not None
        parts = self._ranks.gather_here(self._times.record(self._ahead or 0.0))
        self.last_step = make_record(self._times, parts, in_process=self._ranks.group is None)
        self._times = None
        if self._records is not None:
            self._records.append(self.last_step)

    @contextmanager
    def recording(self) -> Iterator[list[StepRecord]]:
        """Records the steps inside, and appends them to the list that it yields."""
        before = self.record, self._records
        self.record, self._records = True, []
        try:
            yield self._records
        finally:
            self.record, self._records = before
