"""The record of a step: when each action ran on each rank, what waited and was sent, and why ranks were idle."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import record_function

from zbcompile.distributed.clocks import Clock
from zbcompile.profiling.step_record import Span, StepRecord
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import Observer, RankRun
from zbcompile.runtime.rank_plan import made_by
from zbcompile.schedules.ir.actions import SEND_B, SEND_F, Action
from zbcompile.schedules.ir.schedule import TORCH_LETTERS, Schedule, format_step


@dataclass
class Seen:
    """What one process has seen of its ranks; times are on a clock that all ranks share."""

    begin: float
    end: float
    timed: dict[int, list[Span]]
    held: dict[int, list[int]]
    sent: dict[int, int]


@dataclass
class Recorder:
    """Observes the actions of the ranks in this process."""

    program: Program
    schedule: Schedule
    clock: Clock = field(default_factory=Clock)
    begin: float = field(default_factory=time.perf_counter)
    marks: dict[int, list[tuple[Action, Any, Any]]] = field(default_factory=dict)
    held: dict[int, list[int]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    opened: dict[int, list[list[Any]]] = field(default_factory=dict)  # when each half of what runs began

    def __call__(self, actions: Sequence[Action], run: RankRun, execute: Callable[[], None]) -> None:
        self.sent[run.rank] = self.sent.get(run.rank, 0) + sum(self._bytes(action, run) for action in actions)
        self.opened.setdefault(run.rank, []).append([self.clock.mark()] * 2)
        execute()
        self._note(actions[-1], run, 1)
        self.opened[run.rank].pop()

    def ended(self, first: Action, run: RankRun) -> None:
        self._note(first, run, 0)

    def began(self, second: Action, run: RankRun) -> None:
        self.opened[run.rank][-1][1] = self.clock.mark()

    def _note(self, action: Action, run: RankRun, half: int) -> None:
        self.marks.setdefault(run.rank, []).append((action, self.opened[run.rank][-1][half], self.clock.mark()))
        live = sum(stage.live_bytes() for stage in run.runs.values())
        live += run.vocabulary.shard.live_bytes() if run.vocabulary is not None else 0
        self.held.setdefault(run.rank, []).append(live)

    def _bytes(self, action: Action, run: RankRun) -> int:
        message = made_by(self.program, action) if action.op in (SEND_F, SEND_B) else None
        return 0 if message is None else sum(tensor.nbytes for tensor in run.outbox[message])

    def seen(self, ahead: float = 0.0) -> Seen:
        """Waits for the device. The times are on a clock that this process's clock is `ahead` of."""
        at = self.clock.seconds
        timed = {
            r: [Span(str(a), at(s) - ahead, at(e) - ahead) for a, s, e in found] for r, found in self.marks.items()
        }
        return Seen(self.begin - ahead, time.perf_counter() - ahead, timed, self.held, self.sent)


def make_record(recorder: Recorder, parts: Sequence[Seen], in_process: bool) -> StepRecord:
    """One record of what all processes have seen, on one clock."""
    started = min(part.begin for part in parts)
    timed = _merged([part.timed for part in parts])
    spans = {r: [Span(a, s - started, e - started) for a, s, e in found] for r, found in timed.items()}
    return StepRecord(
        spans=spans,
        held_bytes=_merged([part.held for part in parts]),
        bytes_sent=_merged([part.sent for part in parts]),
        step_time=max(part.end for part in parts) - started,
        started=started,
        in_process=in_process,
        schedule=recorder.schedule,
        program=recorder.program.manifest,
    )


def _merged(parts: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    return dict(sorted((rank, found) for part in parts for rank, found in part.items()))


@dataclass(frozen=True)
class Labels:
    """Names actions for torch.profiler as torch's pipeline runtime does (`PP:0F3`), around an observer or alone."""

    inner: Observer | None

    def __call__(self, actions: Sequence[Action], run: RankRun, execute: Callable[[], None]) -> None:
        with record_function("PP:" + "|".join(map(_torch_name, actions))):
            if self.inner is None:
                execute()
            else:
                self.inner(actions, run, execute)

    def ended(self, first: Action, run: RankRun) -> None:
        if self.inner is not None:
            self.inner.ended(first, run)

    def began(self, second: Action, run: RankRun) -> None:
        if self.inner is not None:
            self.inner.began(second, run)


def _torch_name(action: Action) -> str:
    return format_step(action, "torch") if action.op in TORCH_LETTERS else str(action)
