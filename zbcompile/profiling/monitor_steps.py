"""`zbcompile.monitor`: a line of figures every few steps, and a warning that names a rank that became slow."""

import resource
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

import torch

from zbcompile.batches.batch import Microbatches
from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.mesh import BATCHES
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.prediction.predict import predicted_costs
from zbcompile.profiling.observation import ObservedPipeline
from zbcompile.program.step_record import StepRecord, mean_seconds
from zbcompile.schedules import Schedule, Timeline, simulate
from zbcompile.schedules.visualization.step_tables import pass_bubble
from zbcompile.tables import Figure, Table, facts, to_line


@dataclass(frozen=True)
class Figures:
    """What `zbcompile.monitor` knows after step number `step`; as text, one line.

    * `seconds`: the mean time of a step since the last figures, with everything else that the loop does.
    * `rate`: tokens or samples (`unit`) in a second, of all replicas.
    * `bubble`: the share of this step, from its first pass to its last, that the busiest rank was idle; of ranks in one
      process, of their passes as if each had a process of its own. `predicted_bubble`: the same of the prediction.
    * `busy`: by rank, the seconds of its passes in this step. `slowest` is the longest relative to the mean of all, and
      `predicted_slowest` what is predicted of the same rank.
    * `memory`: by rank, the most bytes that its process has held so far: of tensors on its GPU, else in all.
    * `slow`: ranks that became slow, each with how many times as long as usual its passes take; they did so in the
      figures before these as well.
    """

    step: int
    seconds: float
    rate: float
    unit: str
    bubble: float
    predicted_bubble: float
    busy: Mapping[str, float]
    slowest: float
    predicted_slowest: float
    memory: Mapping[str, int]
    slow: Mapping[str, float]

    def __str__(self) -> str:
        return to_line(self.tables()[0].rows[0])

    def tables(self) -> tuple[Table, Table]:
        """The line as a table, and what it says of each rank."""
        slowest, fullest = (max(each, key=each.__getitem__) for each in (self.busy, self.memory))
        line = [
            Figure("step", self.step),
            Figure("time", self.seconds, "s", "step"),
            Figure(f"{self.unit} per second", self.rate, "1/s"),
            Figure("bubble", self.bubble, "share", "step"),
            Figure("predicted bubble", self.predicted_bubble, "share", "step"),
            Figure("slowest", slowest),
            Figure("times the mean", self.slowest, "ratio"),
            Figure("predicted", self.predicted_slowest, "ratio"),
            Figure("memory", self.memory[fullest], "B"),
            *([Figure("of", fullest)] if len(self.memory) > 1 else []),
        ]
        ranks = [
            [
                Figure("rank", name),
                Figure("busy", busy, "s", "step"),
                Figure("memory", self.memory.get(name), "B"),
                Figure("times as slow as usual", self.slow.get(name), "ratio"),
            ]
            for name, busy in self.busy.items()
        ]
        return facts("monitor", line), Table("ranks", "Ranks", ranks)


@contextmanager
def monitor(
    pipe: ObservedPipeline, every: int = 10, callback: Callable[[Figures], object] = print, slow: float = 1.5
) -> Iterator[None]:
    """Show `Figures` of the steps inside, whenever their number divides by `every`. Every rank must enter it; the first
    one calls `callback`, by default `print`.

    Only the steps that are shown are recorded, begin together on all ranks and exchange figures; the others cost
    nothing. Warns (RuntimeWarning, on the first rank) of a rank whose passes take `slow` times as long as usual, twice
    in a row, if other ranks' passes do not. Raises PipelineError, on every rank, unless all ask for the same.

    >>> with zbcompile.monitor(pipe, every=100, callback=lambda f: logger.log(vars(f))):     # doctest: +SKIP
    ...     train(pipe)
    """
    with pipe.ranks.watch.region("monitor"):
        asked = gathered(pipe.ranks, every)
    if not all(isinstance(each, int) and each >= 1 for each in asked) or len(set(asked)) > 1:
        raise PipelineError(f"monitor(every=): ranks ask for {asked}; expected one whole number of at least 1.")
    with pipe.observation.watched(_Monitor(pipe, every, callback, UsualTimes(slow))):
        yield


class _Share(NamedTuple):
    """One process's figures of the last steps: `busy` of its ranks, the `typical` time of their passes for a
    microbatch, which a single disturbance does not change. `amount` is counted once per replica."""

    rank: int
    host: str
    busy: Mapping[int, float]
    typical: Mapping[int, float]
    memory: int
    amount: int


@dataclass
class _Monitor:
    pipe: ObservedPipeline
    every: int
    callback: Callable[[Figures], object]
    usual: "UsualTimes"
    since: float | None = None  # the first step inside may compile: what is shown begins at its end
    steps: int = 0
    amount: int = 0
    predicted: tuple[Schedule, Timeline] | None = None

    def wants(self, index: int) -> bool:
        return self.since is not None and index % self.every == 0

    def done(self, index: int, step: Microbatches, record: StepRecord | None) -> None:
        if self.since is None:
            self.since = time.perf_counter()
            return
        self.steps += 1
        self.amount += step.amount[0]
        if record is None or index % self.every:
            return
        now = time.perf_counter()
        with self.pipe.ranks.watch.region("monitor"):
            shares = gathered(self.pipe.ranks, self._share(record))
        if self.pipe.ranks.is_first:
            self._show(index, (now - self.since) / self.steps, step.amount[1], record, shares)
        self.since, self.steps, self.amount = time.perf_counter(), 0, 0

    def _share(self, record: StepRecord) -> _Share:
        ranks = self.pipe.ranks
        busy = {rank: record.timeline.busy[rank] for rank in ranks.local}
        typical = {rank: sum(mean_seconds({rank: record.spans[rank]}, median).values()) for rank in ranks.local}
        counts = 0 in ranks.local and ranks.mesh.index(*ranks.mesh.beside("pp", *BATCHES)) == 0
        amount = self.amount if counts else 0
        return _Share(
            ranks.members[ranks.number], socket.gethostname(), busy, typical, _most_memory(ranks.device), amount
        )

    def _show(self, index: int, seconds: float, unit: str, record: StepRecord, shares: Sequence[_Share]) -> None:
        named = {name: (share, rank) for share in shares for rank, name in _names(share, shares).items()}
        busy = {name: share.busy[rank] for name, (share, rank) in named.items()}
        memory = {name: share.memory for name, (share, _) in named.items()}
        slowest = max(busy, key=busy.__getitem__)
        predicted = self._prediction(record.schedule)
        figures = Figures(
            step=index,
            seconds=seconds,
            rate=sum(share.amount for share in shares) / self.steps / seconds,
            unit=unit,
            bubble=pass_bubble(record.as_ranks()),
            predicted_bubble=pass_bubble(predicted),
            busy=busy,
            slowest=_ratio(busy[slowest], mean(busy.values())),
            predicted_slowest=_ratio(predicted.busy[named[slowest][1]], mean(predicted.busy)),
            memory=memory if len(shares) > 1 else {"this process": shares[0].memory},
            slow=self.usual.slow({name: share.typical[rank] for name, (share, rank) in named.items()}),
        )
        self.callback(figures)
        for name, ratio in self.usual.new.items():
            text = f"zbcompile: {name} became slow: in step {index} its passes take {ratio:.1f} times as long as usual"
            warnings.warn(f"{text}, unlike other ranks'.", RuntimeWarning, stacklevel=2)

    def _prediction(self, schedule: Schedule) -> Timeline:
        if self.predicted is None or self.predicted[0] is not schedule:
            self.predicted = schedule, simulate(schedule, predicted_costs(self.pipe.program))
        return self.predicted[1]


@dataclass
class UsualTimes:
    """What the passes of each rank usually take, and which ranks became slow."""

    limit: float
    seen: dict[str, deque[float]] = field(default_factory=dict)
    suspect: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    new: Mapping[str, float] = field(default_factory=dict)

    def slow(self, times: Mapping[str, float]) -> dict[str, float]:
        """The ranks that are slow now and were the last time, each with how many times its usual time it takes; `new`
        are those that were not slow before."""
        ratios = {name: _ratio(now, median(self.seen[name])) for name, now in times.items() if name in self.seen}
        suspect = frozenset(name for name in ratios if self._stands_out(name, ratios))
        for name in times.keys() - suspect:
            self.seen.setdefault(name, deque(maxlen=_REMEMBERED)).append(times[name])
        slow = {name: ratios[name] for name in sorted(suspect & self.suspect)}
        self.new = {name: ratio for name, ratio in slow.items() if name not in self.known}
        self.suspect, self.known = suspect, frozenset(slow)
        return slow

    def _stands_out(self, name: str, ratios: Mapping[str, float]) -> bool:
        others = median([ratio for other, ratio in ratios.items() if other != name] or [1.0])
        return len(self.seen[name]) > 1 and ratios[name] > self.limit * max(1.0, others)


_REMEMBERED = 9


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _names(share: _Share, shares: Sequence[_Share]) -> dict[int, str]:
    """The names of the ranks of a process in a message: with the process and the host, if these differ."""
    process = "" if len(shares) == 1 or all(s.rank in s.busy for s in shares) else f" (process {share.rank})"
    host = f" on {share.host}" if len({s.host for s in shares}) > 1 else ""
    return {rank: f"rank {rank}{process}{host}" for rank in share.busy}


def _most_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on a GPU, with the gaps between them, else in all."""
    if gpu.is_gpu(device):
        return gpu.peak_memory(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
