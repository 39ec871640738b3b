"""The recorder of the steps of a pipeline.

The record of a step says when each action ran on each rank, what waited and was sent, and why ranks
were idle.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zbcompile.distributed.clocks import Clock, clock_of, offset_to_first
from zbcompile.distributed.ranks import GroupRanks, Ranks
from zbcompile.engine.rank import Observer, RankRun, StepRecorder
from zbcompile.engine.rank_plan import Instruction
from zbcompile.program.program import Program
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import SENDS, Action


@dataclass
class ProcessRecord:
    """What one process has seen of its ranks; times are on a clock that all ranks share."""

    begin: float
    end: float
    timed: dict[int, list[RecordedSpan]]
    held: dict[int, list[int]]
    sent: dict[int, int]


@dataclass
class ActionTimes(Observer):
    """Observes the actions of the ranks in this process during one step."""

    program: Program
    schedule: Schedule
    clock: Clock = field(default_factory=Clock)
    begin: float = field(default_factory=time.perf_counter)
    marks: dict[int, list[tuple[Action, Any, Any]]] = field(default_factory=dict)
    held: dict[int, list[int]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    opened: dict[int, list[list[Any]]] = field(
        default_factory=dict
    )  # when each half of what runs began

    def __call__(
        self, of: Sequence[Instruction], run: RankRun, execute: Callable[[], None]
    ) -> None:
        sent = [
            run.outbox[each.carries]
            for each in of
            if each.action.op in SENDS and each.carries is not None
        ]
        self.sent[run.rank] = self.sent.get(run.rank, 0) + sum(
            tensor.nbytes for each in sent for tensor in each
        )
        self.opened.setdefault(run.rank, []).append([self.clock.mark()] * 2)
        execute()
        self._note(of[-1].action, run, 1)
        self.opened[run.rank].pop()

    def ended(self, first: Action, run: RankRun) -> None:
        self._note(first, run, 0)

    def began(self, second: Action, run: RankRun) -> None:
        self.opened[run.rank][-1][1] = self.clock.mark()

    def _note(self, action: Action, run: RankRun, half: int) -> None:
        self.marks.setdefault(run.rank, []).append(
            (action, self.opened[run.rank][-1][half], self.clock.mark())
        )
        live = sum(stage.live_bytes() for stage in run.runs.values())
        self.held.setdefault(run.rank, []).append(live)

    def seen(self, ahead: float = 0.0) -> ProcessRecord:
        """Waits for the device. The times are on a clock that this process's clock is
        `ahead` of."""
        at = self.clock.seconds
        timed = {
            r: [RecordedSpan(str(a), at(s) - ahead, at(e) - ahead) for a, s, e in found]
            for r, found in self.marks.items()
        }
        return ProcessRecord(
            self.begin - ahead, time.perf_counter() - ahead, timed, self.held, self.sent
        )


def make_record(times: ActionTimes, parts: Sequence[ProcessRecord], in_process: bool) -> StepRecord:
    """One record of what all processes have seen, on one clock."""
    started = min(part.begin for part in parts)
    timed = _merged([part.timed for part in parts])
    spans = {
        r: [RecordedSpan(a, s - started, e - started) for a, s, e in found]
        for r, found in timed.items()
    }
    return StepRecord(
        spans=spans,
        held_bytes=_merged([part.held for part in parts]),
        bytes_sent=_merged([part.sent for part in parts]),
        step_time=max(part.end for part in parts) - started,
        started=started,
        in_process=in_process,
        schedule=times.schedule,
        program=times.program.manifest,
    )


def _merged(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    return dict(sorted((rank, found) for part in parts for rank, found in part.items()))


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
        """What observes the next step. All ranks begin it together, on clocks that have been
        compared."""
        ranks = self._ranks
        if isinstance(ranks, GroupRanks):
            with ranks.watch.position.waiting("the common start"):
                if self._ahead is None:
                    self._ahead = offset_to_first(ranks.everyone, ranks.device)
                dist.barrier(ranks.group)
        self._times = ActionTimes(program, schedule, clock_of(ranks.device))
        return self._times

    def end(self) -> None:
        """Let `last_step` be what all ranks of the pipeline have seen of the step, on every
        rank."""
        assert self._times is not None
        parts = self._ranks.gather_here(self._times.seen(self._ahead or 0.0))
        self.last_step = make_record(self._times, parts, in_process=self._ranks.group is None)
        self._times = None

    @contextmanager
    def recording(self) -> Iterator[list[StepRecord]]:
        """Records the steps inside; the list that it gives fills with them."""
        before = self.record, self._records
        self.record, self._records = True, []
        try:
            yield self._records
        finally:
            self.record, self._records = before

    def of_step(self) -> StepRecorder | None:
        """The recorder of the next step; None if no record of it is wanted."""
        if not self.record:
            self.last_step = None
        return self if self.record else None

    def of_forward(self) -> StepRecorder | None:
        """The recorder of a run of forwards; None if no record is wanted."""
        return self if self.record else None

    def done(self) -> None:
        """Keeps the record of a step or forward for those who collect records."""
        if self.record and self._records is not None and self.last_step is not None:
            self._records.append(self.last_step)
