"""The record of a step: when each action ran on each rank, what waited and was sent, and why ranks were idle."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zbcompile.distributed.clocks import Clock
from zbcompile.program.program import Program
from zbcompile.program.step_record import RecordedSpan, StepRecord
from zbcompile.runtime.action_loop import Observer, RankRun
from zbcompile.runtime.rank_plan import Instruction
from zbcompile.schedules.ir.actions import SENDS, Action
from zbcompile.schedules.ir.schedule import Schedule


@dataclass
class Seen:
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
    opened: dict[int, list[list[Any]]] = field(default_factory=dict)  # when each half of what runs began

    def __call__(self, of: Sequence[Instruction], run: RankRun, execute: Callable[[], None]) -> None:
        sent = [run.outbox[each.carries] for each in of if each.action.op in SENDS and each.carries is not None]
        self.sent[run.rank] = self.sent.get(run.rank, 0) + sum(tensor.nbytes for each in sent for tensor in each)
        self.opened.setdefault(run.rank, []).append([self.clock.mark()] * 2)
        execute()
        self._note(of[-1].action, run, 1)
        self.opened[run.rank].pop()

    def ended(self, first: Action, run: RankRun) -> None:
        self._note(first, run, 0)

    def began(self, second: Action, run: RankRun) -> None:
        self.opened[run.rank][-1][1] = self.clock.mark()

    def _note(self, action: Action, run: RankRun, half: int) -> None:
        self.marks.setdefault(run.rank, []).append((action, self.opened[run.rank][-1][half], self.clock.mark()))
        live = sum(stage.live_bytes() for stage in run.runs.values())
        self.held.setdefault(run.rank, []).append(live)

    def seen(self, ahead: float = 0.0) -> Seen:
        """Waits for the device. The times are on a clock that this process's clock is `ahead` of."""
        at = self.clock.seconds
        timed = {
            r: [RecordedSpan(str(a), at(s) - ahead, at(e) - ahead) for a, s, e in found]
            for r, found in self.marks.items()
        }
        return Seen(self.begin - ahead, time.perf_counter() - ahead, timed, self.held, self.sent)


def make_record(times: ActionTimes, parts: Sequence[Seen], in_process: bool) -> StepRecord:
    """One record of what all processes have seen, on one clock."""
    started = min(part.begin for part in parts)
    timed = _merged([part.timed for part in parts])
    spans = {r: [RecordedSpan(a, s - started, e - started) for a, s, e in found] for r, found in timed.items()}
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
