"""A predicted step: when each action runs, the length of the step, the memory of every rank, and why ranks wait."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from zbcompile.schedules.execution.deadlock import require_finished
from zbcompile.schedules.execution.event_loop import Outcome, run, without_collector
from zbcompile.schedules.execution.memory import deltas, peak_memory
from zbcompile.schedules.ir.actions import COMMUNICATION, GATHER, VALIDATE, Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Lowered, Picturable, Schedule, parts
from zbcompile.schedules.simulation.idle_causes import CAUSES, Cause, Idle, Input, Waits


class Span(NamedTuple):
    """`step` (an action or a pair of them) ran on `rank` from `start` to `end`."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline(Picturable):
    """What `simulate` predicts. Times count from the first start, in the unit of the costs.

    * `makespan`: the whole step with an optimizer barrier: from the first start to the last end on any rank, then
      `costs.barrier`, then the slowest rank's optimizer; of orders that have the optimizer's actions, to the last end.
    * `cost`: the longest own span of a rank, from its first pass to its last end, with its own optimizer: what counts
    if ranks may start the next step on their own (Qi et al., Zero Bubble, section 4).
    * `work`: the sum of passes (and optimizer) on the busiest rank. `bubble` = 1 - work/makespan, `cost_bubble` =
      1 - work/cost.
    * `peak_memory[rank]`, in the unit of `costs.activation`.
    * `memory_limits[rank]`, in that unit, if the order was asked to keep within some: pictures draw them.
    * `spans`: every step, rank by rank in order of time; `idle`: every gap, with its cause.
    """

    program: Schedule | Lowered
    costs: Costs
    run: Outcome
    peak_memory: tuple[float, ...]
    memory_limits: tuple[float, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return parts(self.program)[0]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The sum of the passes of every rank, without its optimizer."""
        return tuple(sum(end) - sum(begin) for begin, end in zip(self.run.begin, self.run.end, strict=True))

    @cached_property
    def finish(self) -> float:
        """When the last pass of any rank ends; the first one starts at 0."""
        return max((end[-1] for end in self.run.end if end), default=0)

    @cached_property
    def optimizer(self) -> tuple[float, ...]:
        """The time of every rank's optimizer step behind its last pass; none if actions of the orders take it."""
        if self._updates:
            return (0,) * self.schedule.ranks
        placement = self.schedule.placement
        return tuple(sum(self.costs.optimizer[s] for s in placement.stages_of(r)) for r in range(placement.ranks))

    @cached_property
    def _updates(self) -> bool:
        """Whether actions of the orders are the optimizer's steps."""
        return any("optimizer" in KINDS[op].time for op in self.schedule.ops)

    @property
    def makespan(self) -> float:
        return self.finish if self._updates else self.finish + self.costs.barrier + max(self.optimizer)

    @cached_property
    def cost(self) -> float:
        starts = map(_first_start, parts(self.program)[1], self.run.begin)
        spans = zip(starts, self.run.end, self.optimizer, strict=True)
        return max((end[-1] - start + optimizer for start, end, optimizer in spans if end), default=0)

    @cached_property
    def work(self) -> float:
        return max(busy + optimizer for busy, optimizer in zip(self.busy, self.optimizer, strict=True))

    @property
    def bubble(self) -> float:
        return max(0, 1 - self.work / self.makespan) if self.makespan else 0

    @property
    def cost_bubble(self) -> float:
        return max(0, 1 - self.work / self.cost) if self.cost else 0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for rank in range(self.schedule.ranks) for span in self.spans_of(rank))

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, without SEND and RECV."""
        steps = parts(self.program)[1][rank]
        times = zip(steps, self.run.begin[rank], self.run.end[rank], strict=True)
        return tuple(Span(rank, step, begin, end) for step, begin, end in times if step[0] not in COMMUNICATION)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        return tuple(idle for rank in range(self.schedule.ranks) for idle in self.waits.of_rank(rank))

    @cached_property
    def waits(self) -> Waits:
        """Finds, for every step, the input that held it up."""
        return Waits(self.program, self.costs, self.run)

    def messages(self) -> Iterator[tuple[int, int, Input]]:
        """Yields for every message between two ranks the rank and the index of the step that uses it, and its source.

        Collectives of the vocabulary passes are left out.
        """
        for rank, order in enumerate(parts(self.program)[1]):
            for index, step in enumerate(order):
                if step[0] not in COMMUNICATION and not self.waits.is_collective(rank, index):
                    yield from ((rank, index, n) for n in self.waits.inputs(rank, index) if n.rank != rank)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The possible causes of idle time; overhead only if it was measured."""
        measured = any(gap.cause == "overhead" for gap in self.idle)
        return tuple(cause for cause in CAUSES if measured or cause != "overhead")

    @cached_property
    def idle_by_cause(self) -> tuple[dict[Cause, float], ...]:
        """The idle time of every rank by cause."""
        totals: tuple[dict[Cause, float], ...] = tuple(dict.fromkeys(self.causes, 0) for _ in self.run.end)
        for gap in self.idle:
            totals[gap.rank][gap.cause] += gap.end - gap.start
        return totals

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The memory of `rank` from each time on, as (time, amount); 0 before the first."""
        spans = self.spans_of(rank)
        steps = tuple(span.step for span in spans)
        times = ((span.start, span.end) for span in spans for _ in flatten((span.step,)))
        changes = zip(times, deltas(steps, self.costs), strict=True)
        curve = [(begin if change > 0 else end, change) for (begin, end), change in changes if change]
        amounts = accumulate(change for _, change in curve)
        return tuple((time, amount) for (time, _), amount in zip(curve, amounts, strict=True))


def _first_start(order: Sequence[Step], begins: Sequence[float]) -> float:
    """The time at which a rank begins, without the wait for the previous step."""
    own = (begin for step, begin in zip(order, begins, strict=True) if step[0] not in (VALIDATE, GATHER))
    return next(own, 0)


@without_collector()
def simulate(program: Schedule | Lowered, costs: Costs | None = None) -> Timeline:
    """Run a schedule, or a lowered program, under `costs` (default: every pass takes 1, hops are free).

    Every rank runs its order; a step begins when its rank is free and what it needs has arrived. A result is available
    on another rank `costs.hop` after its pass has ended; a hop occupies neither rank. In a schedule messages are
    buffered without limit, in a lowered program a rank stands still at a SEND until its receive is posted. Raises
    `ScheduleError` if the orders do not run to their end; the other rules are left to `check`.

    >>> from zbcompile.schedules import build
    >>> t = simulate(build("1f1b", ranks=4, microbatches=8))
    >>> t.makespan, t.peak_memory
    (33, (4, 3, 2, 1))
    """
    schedule, _ = parts(program)
    costs = costs or Costs.uniform(schedule.stages)
    outcome = run(program, costs)
    require_finished(program, outcome)
    return Timeline(program, costs, outcome, peak_memory(schedule, costs))
