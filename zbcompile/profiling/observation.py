"""What looks at the steps of a pipeline: the recorder, and what `zbcompile.trace` and `zbcompile.monitor` add."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from zbcompile.distributed.ranks import Ranks
from zbcompile.model.batch import Microbatches
from zbcompile.profiling.recorder import Recorder
from zbcompile.program.program import Program
from zbcompile.program.step_record import StepRecord


class Watcher(Protocol):
    """Decides before each step whether to record it; notified when the step ends."""

    def wants(self, index: int) -> bool: ...
    def done(self, index: int, step: Microbatches, record: StepRecord | None) -> None: ...


class Observation:
    """Which steps of a pipeline are recorded (all, if `record`), and who is notified of each."""

    def __init__(self, ranks: Ranks) -> None:
        self.record = False
        self._recorder = Recorder(ranks)
        self._records: list[StepRecord] | None = None
        self._watchers: list[Watcher] = []

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last step, if it was recorded."""
        return self._recorder.last_step

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

    def of_step(self, index: int) -> Recorder | None:
        """What records step number `index`, None if nobody wants its record."""
        if any([self.record, *(each.wants(index) for each in self._watchers)]):
            return self._recorder
        self._recorder.last_step = None
        return None

    def of_forward(self) -> Recorder | None:
        """What records a run of forwards, None if that is not wanted."""
        return self._recorder if self.record else None

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
