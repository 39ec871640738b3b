"""The record of a step: when each action ran on each rank, and how much waited for its backward."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from zbcompile.loop import RankRun
from zbcompile.schedules.actions import Action


class Span(NamedTuple):
    """One action with its start and end in seconds since the step began on its rank."""

    action: str
    start: float
    end: float


@dataclass(frozen=True)
class StepRecord:
    """What `pipe.last_step` holds after a recorded step.

    `spans[rank]` are the actions in the order in which they ran, `peak_activation_bytes[rank]` the most bytes that
    waited for B and W after any action, counted by storage, `step_time` the seconds of the whole step on this process.
    """

    spans: dict[int, list[Span]]
    peak_activation_bytes: dict[int, int]
    step_time: float
    in_process: bool


@dataclass
class Recorder:
    """Observes the actions of the ranks in this process."""

    begin: float = field(default_factory=time.perf_counter)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)

    def __call__(self, action: Action, run: RankRun, execute: Callable[[], None]) -> None:
        start = time.perf_counter()
        execute()
        end = time.perf_counter()
        self.spans.setdefault(run.rank, []).append(Span(str(action), start - self.begin, end - self.begin))
        live = sum(stage.live_bytes() for stage in run.runs.values())
        self.peak[run.rank] = max(self.peak.get(run.rank, 0), live)

    def finish(self, in_process: bool) -> StepRecord:
        return StepRecord(self.spans, self.peak, time.perf_counter() - self.begin, in_process)
