"""Layouts: the ways to place, cut and order a captured step on some ranks, priced without compiling it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf
from typing import TypeVar

from zbcompile.compiler.cut_planning import first_microbatches, places_of
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Barriers, Choices, Policy, Recompute
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.balance import LoadRow, best_cuts, heaviest_piece
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.search import Limits, choose_edges
from zbcompile.planning.choose_schedule import named_order, placement_of
from zbcompile.program.choice import Choice, Layout
from zbcompile.schedules import (
    Costs,
    Placement,
    ScheduleError,
    SearchResult,
    Timeline,
    bound,
    search,
    simulate,
)
from zbcompile.schedules.execution.memory import with_messages
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.searching.problem import ROUNDING

PLACEMENTS = ("linear", "looped:2", "v", "looped:4")
GLANCE = 100  # moves for a first look at a layout; the orders to start from say most of it
MANY = 100  # stages x microbatches, from which on a move takes so long that there are fewer,
HUGE = 2000  # and from which on there are none
PATIENCE = 600.0  # seconds that a glance may take; what counts are its moves, on a busy machine too

Result = TypeVar("Result")


def rounded(seconds: float) -> float:
    """To nine digits: sums that differ in their last ones are equal, so that memory decides.

    >>> rounded(0.1 + 0.2) == rounded(0.3)
    True
    """
    return float(f"{seconds:.9g}")


def is_large(layout: Layout) -> bool:
    return layout.parsed.stages * layout.microbatches > HUGE


@dataclass(frozen=True, eq=False)
class LayoutSearch:
    """The layouts that a step may have on `ranks` ranks, within the user's `choices`, and what each takes.

    * `lines`: the prices of a microbatch, by `vocab=`, if the batch is split into `microbatches`; with `rows=2.0` its
      microbatches have twice as many rows as those that were priced;
    * `counts`: the other numbers of microbatches that the batch can be split into; `chunks`: stages per rank, if given;
    * `brief`: only the first microbatches of large steps are ordered and simulated; the rest follows at their pace;
    * `schedule`: "auto", or a name whose order, cuts and recomputation all layouts then have.
    """

    lines: Mapping[Barriers, LinePrices]
    ranks: int
    microbatches: int
    choices: Choices
    counts: tuple[int, ...] = ()
    chunks: int | None = None
    brief: bool = False
    schedule: str = "auto"
    rows: float = 1.0
    _edges: dict[object, list[int] | None] = field(default_factory=dict, init=False)  # cuts that were computed

    def lay_out(
        self, layout: Layout, seconds: float | None = None, lean: bool | None = None, order: Choice | None = None
    ) -> Choice:
        """Find an order for the layout within `seconds`, by default with few moves; the order of another choice is
        taken if it is shorter. If `lean` (by default unless the step is large) of equally short orders the one that
        holds least. Raises PartitionError or ScheduleError if the layout does not fit."""
        costs, count, limits = self.task(layout)
        if self.is_named:
            found = named_order(self.schedule, layout, costs, count, limits, self.chunks)
        else:
            few = GLANCE // (1 + costs.stages * layout.microbatches // MANY)
            moves = None if seconds else 0 if is_large(layout) else few
            found = search(
                costs,
                self.ranks,
                count,
                limits,
                (layout.placement,),
                seconds=seconds or PATIENCE,
                moves=moves,
                barriers=layout.barriers,
                lean=moves != 0 if lean is None else lean,
            )
            found = _shorter(found, costs, limits, order)
        whole, prices = whole_step(layout, found.simulation), self.lines[layout.vocab]
        how = self.rows_of(layout), layout.recompute
        peak = prices.most_held(found.schedule, layout.edges, *how)
        return Choice(
            layout,
            found.schedule,
            found.origin,
            whole,
            float(found.bound),
            resident=prices.always_held(found.schedule.placement, layout.edges, how[0]),
            peak=peak,
            bubble=1 - found.simulation.work * layout.microbatches / count / whole if whole else 0.0,
            basis="the graphs of distinct blocks",
            best_name=found.best_name,
        )

    def timeline(self, choice: Choice) -> Timeline:
        """The simulated step of a choice; of a brief one that of its first microbatches."""
        return simulate(choice.order, self.task(choice.layout)[0])

    def is_huge(self, layout: Layout) -> bool:
        """Whether a glance takes so long that it has to promise something."""
        return self.brief and is_large(layout)

    def least_of_line(self) -> float:
        """The least seconds of a step in a line of equal stages; infinite if none fits."""
        asked = product(self.shardings, self.recomputations)
        return min(self.bound(self.layout("linear", how, vocab)) for vocab, how in asked)

    @property
    def placements(self) -> tuple[str, ...]:
        """The placements that there are cuts for. Raises PartitionError for named cuts that fit none."""
        if self.ranks == 1 and self.chunks is None and not self.is_named:
            return ("linear",)
        if self.is_named:
            return (placement_of(self.schedule, self.ranks, self.chunks),)
        usual = PLACEMENTS if self.chunks in (None, 1, 2, 4) else (f"looped:{self.chunks}",)
        parsed = {name: Placement.parse(name, self.ranks) for name in usual}
        stages = None if isinstance(self.choices.balance, str) else len(self.choices.balance) + 1
        found = [n for n, p in parsed.items() if self.chunks in (None, p.chunks) and stages in (None, p.stages)]
        if not found:
            raise PartitionError(
                f"balance= names the cuts of {stages} stages, which no placement has on {self.ranks} ranks; expected "
                f"{' or '.join(map(str, sorted({p.stages - 1 for p in parsed.values()})))} cuts."
            )
        return tuple(found)

    @cached_property
    def corners(self) -> tuple[Policy, ...]:
        """What each stage may recompute: under a limit of memory something or all, unless something else was asked."""
        free = self.choices.memory is not None and self.choices.recompute == "hints" and not self.is_named
        return next(iter(self.lines.values())).corners if free else ()

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """What all stages recompute at first sight: as asked for, or each of the corners."""
        return self.corners or (self.choices.recompute,)

    @property
    def shardings(self) -> tuple[Barriers, ...]:
        """What the output layer may be at first sight; two barriers are tried where one is best."""
        return tuple(vocab for vocab in self.lines if vocab != 2 or len(self.lines) == 1)

    def layout(self, placement: str, recompute: Recompute | None = None, vocab: Barriers = "off") -> Layout:
        """A layout for the microbatches as they come, before the line is cut."""
        return Layout(placement, self.ranks, self.microbatches, (), recompute or self.choices.recompute, vocab)

    @property
    def is_named(self) -> bool:
        return find(self.schedule).name != "auto"

    def require_room(self) -> None:
        """Raise PartitionError if what the ranks hold all the time is more than they have together."""
        room, least = self.choices.memory, min(map(self._held, self.lines.values())) / self.ranks
        if room is not None and least > room:
            raise PartitionError(
                f"no layout fits: rank 0 holds {least:,.0f} bytes of parameters, gradients and optimizer state if all "
                f"{self.ranks} ranks hold equally much, {least - room:,.0f} more than memory={room:.15g}"
            )

    def _held(self, prices: LinePrices) -> float:
        """Bytes that all ranks hold together."""
        return prices.resident((), Placement("linear", 1, 1))[0] + (self.ranks - 1) * prices.shard_bytes

    def equal_cuts(self, layout: Layout) -> list[int] | None:
        """The cuts that `balance=` names, else those into equal parts."""
        prices, parsed, balance = self.lines[layout.vocab], layout.parsed, self.choices.balance
        if not isinstance(balance, str):
            return edges_named(prices.line, balance, parsed.stages)
        key = "equal", layout.placement, id(prices.line)
        if key not in self._edges:
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            totals = [0.0, *accumulate(prices.loads)]
            self._edges[key] = choose_edges(prices.line, totals, ranks_of, Limits())
        return self._edges[key]

    def lean_cuts(self, layout: Layout) -> list[int] | None:
        """The cuts whose fullest rank holds least with one microbatch; None if there are none, or others are named."""
        if not isinstance(self.choices.balance, str):
            return None
        prices, parsed = self.lines[layout.vocab], layout.parsed
        recompute = layout.recompute == "full"  # of all stages: there are no cuts yet
        key = "lean", layout.placement, id(prices.line), recompute
        if key not in self._edges:
            totals = prices.held_before(recompute)
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            edges = [0, *places_of(prices.line), len(prices.line.nodes)]
            best = best_cuts(LoadRow(totals, ranks_of, heaviest_piece(totals, edges)), edges)
            self._edges[key] = best and best[1]
        return self._edges[key]

    def at_sight(self, layout: Layout, take: Callable[[Layout], Result]) -> Result:
        """What `take` says of equal cuts or, if they hold too much, of those that hold least; errors as of `take`."""
        if layout.edges and isinstance(layout.recompute, tuple):  # chosen together
            return take(layout)
        failed: Exception | None = None
        for cuts in (self.equal_cuts, self.lean_cuts):
            try:
                if (edges := cuts(layout)) is not None:
                    return take(replace(layout, edges=tuple(edges)))
            except (PartitionError, ScheduleError) as error:
                failed = error
        assert failed is not None, "there are equal cuts, or an error"
        raise failed

    def bound(self, layout: Layout) -> float:
        """What no order is shorter than, with the cuts of a glance, within the limit of memory; infinite if none
        fits."""
        with suppress(PartitionError, ScheduleError):
            return self.at_sight(layout, self.bound_of)
        return inf

    def bound_of(self, layout: Layout) -> float:
        """The same with these cuts; errors as of `lay_out`."""
        costs, count, limits = self.task(layout)
        least = bound(costs, self.ranks, count, layout.placement, limits, barriers=layout.barriers)
        return float(least + (layout.microbatches - count) * _busiest(costs, layout.parsed))

    def task(self, layout: Layout) -> tuple[Costs, int, list[float] | None]:
        """Costs, microbatches and limits of a search: of many microbatches, if that is to be brief, two a rank."""
        prices, parsed, limits = self.lines[layout.vocab], layout.parsed, None
        how = self.rows_of(layout), layout.recompute
        if self.choices.memory is not None:
            held = prices.held_by_any_order(parsed, layout.edges, *how)
            limits = _room(self.choices.memory, held, layout.placement)
        costs, count = with_messages(prices.costs(layout.edges, *how, parsed), parsed), layout.microbatches
        if self.is_huge(layout):
            count = min(count, 2 * self.ranks)
        return costs, count, limits

    def rows_of(self, layout: Layout) -> float:
        """The rows of a microbatch, of those that were priced."""
        return self.rows * self.microbatches / layout.microbatches

    def places(self, prices: LinePrices) -> list[int]:
        """Where cuts may be moved to: nowhere if they are named."""
        return places_of(prices.line) if isinstance(self.choices.balance, str) else []


def _shorter(found: SearchResult, costs: Costs, limits: Sequence[float] | None, other: Choice | None) -> SearchResult:
    """What was found, with the order of another choice if that is shorter and fits."""
    if other is None or other.order.microbatches != found.schedule.microbatches:
        return found
    timeline = simulate(other.order, costs)
    if rounded(timeline.makespan) >= rounded(found.objective):
        return found
    if any(a > b * ROUNDING for a, b in zip(timeline.peak_memory, limits or timeline.peak_memory, strict=True)):
        return found
    takes = float(timeline.makespan)
    return replace(found, schedule=other.order, simulation=timeline, origin=other.origin, objective=takes)


def _busiest(costs: Costs, placement: Placement) -> float:
    """Seconds that the busiest rank works on a microbatch."""
    work = [0.0] * placement.ranks
    for stage, passes in enumerate(zip(costs.forward, costs.backward, costs.weight, strict=True)):
        work[placement.rank(stage)] += sum(passes)
    return max(work)


def whole_step(layout: Layout, timeline: Timeline) -> float:
    """Seconds of a step if that of its first microbatches is known."""
    more = layout.microbatches - timeline.schedule.microbatches
    return float(timeline.makespan + (more * _pace(timeline) if more else 0))


def _pace(timeline: Timeline) -> float:
    """Seconds for each further microbatch in the same order."""
    count = timeline.schedule.microbatches
    half = simulate(first_microbatches(timeline.schedule, count // 2), timeline.costs)
    return max(timeline.work / count, (timeline.makespan - half.makespan) / (count - count // 2))


def _room(memory: float, resident: Sequence[float], placement: str) -> list[float]:
    """What each rank has left for activations. Raises PartitionError if it is nothing."""
    for rank, held in enumerate(resident):
        if held >= memory:
            raise PartitionError(
                f"placement {placement}: parameters, gradients, optimizer state, messages and the pass that runs take "
                f"{held:,.0f} bytes on rank {rank}, {held - memory:,.0f} more than memory={memory:.15g}"
            )
    return [memory - held for held in resident]
