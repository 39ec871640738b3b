"""A timed step: when each action runs, the length of the step, the memory of every rank, and why
ranks wait."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.memory import deltas, peak_memory
from zbcompile.schedules.execution.order_graph import OrderGraph, blocking, gc_disabled
from zbcompile.schedules.ir.actions import COMMUNICATION, OPT, Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Picturable, Schedule, require_schedule
from zbcompile.schedules.simulation.idle_causes import CAUSES, Cause, Idle, idle_intervals


class Span(NamedTuple):
    """`step` (an action or a pair of them) ran on `rank` from `start` to `end`."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline(Picturable):
    """A simulated or measured step. Times count from the first start, in the unit of the costs.

    * `start`, `end`: by node of `graph`.
    * `makespan`: the whole step with an optimizer barrier: from the first start to the last end on
      any rank, then the slowest rank's optimizer; of orders that have the optimizer's actions, to
      the last end.
    * `cost`: the longest own span of a rank, from its first pass to its last end, with its own
      optimizer: what counts if ranks may start the next step on their own (Qi et al., Zero Bubble,
      section 4).
    * `work`: the sum of passes (and optimizer) on the busiest rank. `bubble` = 1 - work/makespan,
      `cost_bubble` = 1 - work/cost.
    * `peak_memory[rank]`, in the unit of `costs.activation`.
    * `spans`: every step, rank by rank in order of time; `idle`: every gap, with its cause.
    """

    graph: OrderGraph
    costs: Costs
    start: Sequence[float]
    end: Sequence[float]
    peak_memory: tuple[float, ...]

    @property
    def schedule(self) -> Schedule:
        return self.graph.schedule

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The sum of the passes of every rank, without its optimizer."""
        ranks = map(self.graph.nodes, range(self.schedule.ranks))
        return tuple(
            sum(self.end[n] for n in nodes) - sum(self.start[n] for n in nodes) for nodes in ranks
        )

    @cached_property
    def finish(self) -> float:
        """When the last pass of any rank ends; the first one starts at 0."""
        return max(self.end, default=0)

    @cached_property
    def optimizer(self) -> tuple[float, ...]:
        """The time of every rank's optimizer step behind its last pass; none if actions of the
        orders take it."""
        if OPT in self.schedule.ops:
            return (0,) * self.schedule.ranks
        placement = self.schedule.placement
        return tuple(
            sum(self.costs.optimizer[s] for s in placement.stages_of(r))
            for r in range(placement.ranks)
        )

    @property
    def makespan(self) -> float:
        return self.finish + max(self.optimizer)

    @cached_property
    def cost(self) -> float:
        spans: list[float] = [0]
        for rank, optimizer in enumerate(self.optimizer):
            nodes = self.graph.nodes(rank)
            spans += [self.end[nodes[-1]] - self.start[nodes[0]] + optimizer] if nodes else []
        return max(spans)

    @cached_property
    def work(self) -> float:
        return max(map(sum, zip(self.busy, self.optimizer, strict=True)))

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
        """Returns the spans of one rank, without SEND and RECV."""
        steps, nodes = self.graph.steps, self.graph.nodes(rank)
        compute = (n for n in nodes if steps[n][0] not in COMMUNICATION)
        return tuple(Span(rank, steps[n], self.start[n], self.end[n]) for n in compute)

    @cached_property
    def _delays(self) -> list[float]:
        return self.graph.delays(self.costs)

    def blocking(self, node: int) -> int | None:
        """Returns the node whose result delayed `node`; None if its rank was busy until all inputs
        had arrived."""
        return blocking(self.graph, node, self.end, self._delays)

    def messages(self) -> Iterator[tuple[int, int]]:
        """Yields for every message between two ranks the node that makes it and the node that uses
        it."""
        links = [link.kind == "message" for link in self.graph.links]
        for node, inputs in enumerate(self.graph.inputs):
            yield from ((producer, node) for producer, link in inputs if links[link])

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Every gap of every rank. The gaps and passes of a rank add up to `finish`."""
        how = self.start, self.end, self._delays
        return tuple(
            idle
            for rank in range(self.schedule.ranks)
            for idle in idle_intervals(self.graph, rank, *how)
        )

    @cached_property
    def idle_by_cause(self) -> tuple[dict[Cause, float], ...]:
        """The idle time of every rank by cause; overhead is above 0 only if it was measured."""
        ranks = range(self.schedule.ranks)
        totals: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0) for _ in ranks]
        for gap in self.idle:
            totals[gap.rank][gap.cause] += gap.end - gap.start
        return tuple(totals)

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Returns the memory of `rank` from each time on, as (time, amount); 0 before the first."""
        spans = self.spans_of(rank)
        owners = (span for span in spans for _ in flatten((span.step,)))
        changes = zip(owners, deltas([span.step for span in spans], self.costs), strict=True)
        curve = [
            (span.start if change > 0 else span.end, change) for span, change in changes if change
        ]
        return tuple(
            zip((time for time, _ in curve), accumulate(change for _, change in curve), strict=True)
        )


@gc_disabled()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Returns the step of a schedule under `costs` (default: passes take 1, hops are free).

    Every rank runs its order; a step begins when its rank is free and what it needs has arrived. A
    result is available on another rank `costs.hop` after its pass has ended; a hop occupies neither
    rank. Without messages in the orders these are buffered without limit; a SEND waits until its
    receive is posted. Raises `ScheduleError` if the orders do not run to their end; the other rules
    are left to `check`.

    >>> from zbcompile.schedules import build
    >>> t = simulate(build("1f1b", ranks=4, microbatches=8))
    >>> t.makespan, t.peak_memory
    (33, (4, 3, 2, 1))
    """
    require_schedule(schedule)
    costs = costs or Costs.uniform(schedule.stages)
    graph, run = run_to_end(schedule, costs)
    return Timeline(graph, costs, run.start, run.end, peak_memory(schedule, costs))
