"""The recorder of the steps of a pipeline.

The record of a step says when each action ran on each rank, what waited and was sent, and why ranks
were idle.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import GroupRanks, Ranks
from zbcompile.passes import gpu
from zbcompile.program.program import Program
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import Action


class Clock:
    """`mark` records the current time without waiting for the device; `seconds` returns it later,
    on this host's clock, which hosts keep equal (NTP). A GPU marks by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, gpu.is_gpu(device)
        if self._on_gpu:
            gpu.synchronize(device)
        self._base, self._zero = self.mark(), time.time()

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.time()
        event = gpu.Event(enable_timing=True)
        event.record(gpu.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        if not self._on_gpu:
            return float(mark)
        mark.synchronize()
        return self._zero + self._base.elapsed_time(mark) / 1e3


class Mark(NamedTuple):
    """An action with its begin and end, in seconds or as marks of a `Clock`, and the bytes of
    activations that its rank holds behind it."""

    action: str
    begin: Any
    end: Any
    live_bytes: int


@dataclass
class ActionTimes:
    """The actions of the ranks in this process during one step, and the bytes that each of these
    has sent."""

    program: Program
    schedule: Schedule
    clock: Clock
    started: float = field(default_factory=time.time)
    marks: defaultdict[int, list[Mark]] = field(default_factory=lambda: defaultdict(list))
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    running: dict[tuple[int, Action], Any] = field(default_factory=dict)

    def begin(self, action: Action, rank: int) -> None:
        """Records the begin of an action."""
        self.running[rank, action] = self.clock.mark()

    def end(self, action: Action, rank: int, live_bytes: int) -> None:
        """Records the end of an action, behind which the rank holds `live_bytes` bytes."""
        begin, end = self.running.pop((rank, action)), self.clock.mark()
        self.marks[rank].append(Mark(str(action), begin, end, live_bytes))

    def read(self) -> tuple[float, float, dict[int, tuple[list[Mark], int]]]:
        """Returns the begin and the end of the step on this process, and the marks and the bytes
        sent of its ranks, in seconds. Synchronizes with the device."""
        at = self.clock.seconds
        ranks = {
            rank: (
                [Mark(a, at(begin), at(end), live) for a, begin, end, live in marks],
                self.sent[rank],
            )
            for rank, marks in self.marks.items()
        }
        return self.started, time.time(), ranks


class Observation:
    """Records the steps of `ranks` while `record` is set. `last_step` is the record of the last
    one, if it was recorded."""

    def __init__(self, ranks: Ranks) -> None:
        self.record = False
        self.last_step: StepRecord | None = None
        self._ranks = ranks

    def begin(self, program: Program, schedule: Schedule) -> ActionTimes:
        """Starts to record a step, after a barrier of all ranks."""
        ranks = self._ranks
        if isinstance(ranks, GroupRanks):
            with ranks.waiting("the common start"):
                dist.barrier(ranks.group)
        return ActionTimes(program, schedule, Clock(ranks.device))

    def end(self, times: ActionTimes) -> None:
        """Sets `last_step` to the record of all ranks of the pipeline, on every rank."""
        parts = self._ranks.gather_here(times.read())
        started = min(begin for begin, _, _ in parts)
        ranks = dict(sorted(item for _, _, ranks in parts for item in ranks.items()))
        self.last_step = StepRecord(
            spans={
                rank: [RecordedSpan(a, b - started, e - started) for a, b, e, _ in marks]
                for rank, (marks, _) in ranks.items()
            },
            held_bytes={rank: [m.live_bytes for m in marks] for rank, (marks, _) in ranks.items()},
            bytes_sent={rank: sent for rank, (_, sent) in ranks.items()},
            step_time=max(end for _, end, _ in parts) - started,
            started=started,
            in_process=self._ranks.group is None,
            schedule=times.schedule,
            program=times.program.manifest,
        )
