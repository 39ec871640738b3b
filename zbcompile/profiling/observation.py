"""What looks at the steps of a pipeline: the recorder, and what `zbcompile.trace` and `zbcompile.monitor` add."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from zbcompile.batches.batch import Microbatches
from zbcompile.distributed.clocks import clock_of, offset_to_first
from zbcompile.distributed.ranks import GroupRanks, Ranks
from zbcompile.profiling.recorder import ActionTimes, make_record
from zbcompile.program.program import Program
from zbcompile.program.step_record import StepRecord
from zbcompile.runtime.action_loop import StepRecorder
from zbcompile.schedules import Schedule


class Watcher(Protocol):
    """Decides before each step whether to record it; notified when the step ends."""

    def wants(self, index: int) -> bool: ...
    def done(self, index: int, step: Microbatches, record: StepRecord | None) -> None: ...


class Observation:
    """Records steps of `ranks` (all, if `record`), and notifies observers. `last_step` is the
    record of the last one, if it was recorded."""

    def __init__(self, ranks: Ranks) -> None:
        self.record = False
        self.last_step: StepRecord | None = None
        self._ranks = ranks
        self._ahead: float | None = None  # seconds by which this host's clock is ahead of the first rank's
        self._times: ActionTimes | None = None
        self._records: list[StepRecord] | None = None
        self._watchers: list[Watcher] = []

    def begin(self, program: Program, schedule: Schedule) -> ActionTimes:
        """What observes the next step. All ranks begin it together, on clocks that have been compared."""
        ranks = self._ranks
        if isinstance(ranks, GroupRanks):
            with ranks.watch.position.waiting("the common start"):
                if self._ahead is None:
                    self._ahead = offset_to_first(ranks.everyone, ranks.device)
                dist.barrier(ranks.group)
        self._times = ActionTimes(program, schedule, clock_of(ranks.device))
        return self._times

    def end(self) -> None:
        """Let `last_step` be what all ranks of the pipeline have seen of the step, on every rank."""
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

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Notifies `watcher` of the steps inside. Every rank must enter it, and want the same records."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def of_step(self, index: int) -> StepRecorder | None:
        """What records step number `index`, None if no record is wanted."""
        if any([self.record, *(each.wants(index) for each in self._watchers)]):
            return self
        self.last_step = None
        return None

    def of_forward(self) -> StepRecorder | None:
        """What records a run of forwards, None if that is not wanted."""
        return self if self.record else None

    def forward_done(self) -> None:
        """Keeps the record of a forward for those who collect records."""
        if self.record:
            self._collect()

    def step_done(self, index: int, step: Microbatches) -> None:
        """Notifies everyone that step number `index` has ended."""
        self._collect()
        for watcher in self._watchers:
            watcher.done(index, step, self.last_step)

    def _collect(self) -> None:
        if self._records is not None and self.last_step is not None:
            self._records.append(self.last_step)


class Observed(Protocol):
    """A pipeline, as far as its steps are looked at."""

    @property
    def observation(self) -> Observation: ...
    @property
    def program(self) -> Program: ...
    @property
    def ranks(self) -> Ranks: ...
    def from_replicas(self, value: Any) -> list[Any]: ...
