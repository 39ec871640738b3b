"""Layouts: every sensible way to place, cut and order a captured step on some ranks, priced without compiling it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf
from typing import TypeVar

from zbcompile.compiler.cut_planning import (
    first_microbatches,
    keep_most,
    layout_for_makespan,
    places_of,
    score_of,
)
from zbcompile.compiler.descent import GAIN, Descent, Score
from zbcompile.compiler.least_step import LeastStep
from zbcompile.compiler.prices import LinePrices
from zbcompile.compiler.vocabulary_sharding import WORTH
from zbcompile.passes.compile_options import Barriers, Choices, Policy, Recompute
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.balance import LoadRow, best_cuts, heaviest_piece
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.search import Limits, choose_edges
from zbcompile.planning.choose_schedule import named_order, placement_of
from zbcompile.planning.search_cache import best_name_of, cached_search
from zbcompile.program.choice import Choice, Layout
from zbcompile.schedules import (
    Costs,
    Placement,
    Schedule,
    ScheduleError,
    SearchResult,
    Timeline,
    bound,
    simulate,
    with_updates,
)
from zbcompile.schedules.execution.memory import with_messages
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.actions import BW, GATHERS, B, F
from zbcompile.schedules.searching.problem import ROUNDING

PLACEMENTS = ("linear", "looped:2", "v", "looped:4")
GLANCE = 100  # moves for a first look at a layout; the orders to start from say most of it
MANY = 100  # stages x microbatches, from which on a move takes so long that there are fewer,
HUGE = 2000  # and from which on there are none
PATIENCE = 600.0  # seconds that a glance may take; what counts are its moves, on a busy machine too
FINALISTS = 3  # layouts whose cuts are moved
MOVING = 0.7  # share of the time that they get
SEARCHING = 0.5  # share of these seconds that is left for moves with an order for each
ROUNDS = 2  # from far moves of cuts to near ones
STARTS = 3  # orders for which it is chosen what stages recompute
SEARCHED = 2  # of which this many get the rest of the time
SLACKS = (0, 0.5, 0.75, 1, 1.25, 1.5)  # of round trips: orders that are found need some

Result = TypeVar("Result")


def rounded(seconds: float) -> float:
    """To nine digits: sums that differ in their last ones are equal, so that memory decides.

    >>> rounded(0.1 + 0.2) == rounded(0.3)
    True
    """
    return float(f"{seconds:.9g}")


def is_partial(choice: Choice) -> bool:
    """Whether only the first microbatches were ordered."""
    return choice.order.microbatches < choice.layout.microbatches


def _is_large(layout: Layout) -> bool:
    return layout.parsed.stages * layout.microbatches > HUGE


@dataclass(frozen=True, eq=False)
class LayoutSearch:
    """The search for a layout of a step on `ranks` ranks, within the user's `choices`.

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
    _took: dict[Layout, float] = field(default_factory=dict, init=False)  # seconds of the glance at each layout
    _edges: dict[object, list[int] | None] = field(default_factory=dict, init=False)  # cuts that were computed

    def run(self, seconds: float, announce: Callable[[str], None] = lambda text: None) -> list[Choice]:
        """All layouts that fit, the fastest first. Raises PartitionError if none does: it says on which rank, and how
        much is missing."""
        self._require_room()
        looked = self._looked_at(announce)
        if self._is_named and self.choices.balance != "makespan":
            return _fastest(looked)
        several = not is_partial(_fastest(looked)[0])  # a score of cuts of a large step takes a while
        finalists, until = _starts(looked)[: FINALISTS if several else 1], time.monotonic() + MOVING * seconds
        for number, choice in enumerate(finalists):
            announce(f"cuts of {choice.layout}")
            finalists[number] = self._recut(choice, (until - time.monotonic()) / (len(finalists) - number))
        each = (1 - MOVING) * seconds / SEARCHED
        finalists = [self._searched(choice, each, not n) for n, choice in enumerate(_fastest(finalists, SEARCHED))]
        known = {str(choice.layout) for choice in finalists}
        return _fastest([*finalists, *(choice for choice in looked if str(choice.layout) not in known)])

    def lay_out(
        self, layout: Layout, seconds: float | None = None, lean: bool = False, order: Choice | None = None
    ) -> Choice:
        """Find an order for the layout within `seconds`, by default with few moves; the order of another choice is
        taken if it is shorter. Of equally short orders the one that holds least, for large steps only if `lean`. Raises
        PartitionError or ScheduleError if the layout does not fit."""
        costs, count, limits = self._task(layout)
        if self._is_named:
            found = named_order(self.schedule, layout, costs, count, limits, self.chunks)
        else:
            few = GLANCE // (1 + costs.stages * layout.microbatches // MANY)
            moves = None if seconds else 0 if _is_large(layout) else few
            task = costs, self.ranks, count, limits, layout.placement, layout.barriers, seconds or PATIENCE, moves
            lean = lean or moves != 0
            found = cached_search(*task, keep=self.choices.balance != "measured", lean=lean)
            found = _shorter(found, costs, limits, order)
        self._took[layout], whole = found.seconds, whole_step(layout, found.simulation)
        prices, how = self.lines[layout.vocab], (self._rows(layout), layout.recompute)
        peak = prices.most_held(found.schedule, layout.edges, *how)
        if limits and prices.sharding.gathers:  # of which the limits know the largest stage only
            list(_room(self.choices.memory or inf, peak, layout.placement))
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
            best_name=best_name_of(found),
        )

    def timeline(self, choice: Choice, gather: Sequence[float] = ()) -> Timeline:
        """The simulated step of a choice; of a brief one that of its first microbatches. `gather`: seconds in which
        each stage gathers its divided parameters, for which the step waits."""
        costs, reshard = self._task(choice.layout)[0], self.lines[choice.layout.vocab].sharding.reshard
        order = with_updates(choice.order, GATHERS, reshard, (F, B, BW)) if gather else choice.order
        return simulate(order, replace(costs, gather=tuple(gather)))

    def _looked_at(self, announce: Callable[[str], None]) -> list[Choice]:
        """Every layout that is worth a glance, and fits."""
        reasons: list[str] = []
        looked: list[Choice] = []

        def look(layout: Layout) -> Choice | None:
            announce(f"placement {layout.placement}, {layout.microbatches} microbatches")
            try:
                looked.append(self._at_sight(layout, self.lay_out))
            except (PartitionError, ScheduleError) as error:
                reasons.append(str(error))
                return None
            return looked[-1]

        for vocab, placement in product(self._shardings, self.placements):
            if self.brief and vocab != "off" and placement not in (_leading(looked) or self.placements):
                continue
            asked = [self.layout(placement, each, vocab) for each in self.recomputations]
            asked += [] if self.brief else self._least_steps(self.layout(placement, vocab=vocab))
            bounds = [self._bound(each) for each in asked] if len(asked) > 1 else [0.0]
            choice = None
            for layout, least in sorted(zip(asked, bounds, strict=True), key=lambda each: each[1]):
                first = min(looked, key=lambda each: each.seconds, default=None) if self._is_huge(layout) else choice
                if first is None or least < self._aim(first):
                    choice = min(filter(None, (choice, look(layout))), key=lambda each: each.seconds, default=None)
        for choice in _fastest(looked, SEARCHED):
            if choice.layout.vocab == 1 and 2 in self.lines:
                look(replace(choice.layout, vocab=2))
        for choice in _fastest(looked, SEARCHED):
            for count in self.counts:
                other = replace(choice.layout, microbatches=count)
                if count != self.microbatches and (not self.brief or self._bound(other) < self._aim(choice)):
                    look(other)
        if not looked:
            raise PartitionError("no layout fits: " + "; ".join(dict.fromkeys(reasons)))
        return looked

    def _is_huge(self, layout: Layout) -> bool:
        """Whether a glance takes so long that it has to promise something."""
        return self.brief and _is_large(layout)

    def _aim(self, choice: Choice) -> float:
        """What the bound of a layout must be below if it is to be looked at after this one: the step that was found or,
        where a glance takes long, its bound, as if all orders were as far above theirs."""
        return choice.bound if self._is_huge(choice.layout) else choice.seconds

    def least_of_line(self) -> float:
        """The least seconds of a step in a line of equal stages; infinite if none fits."""
        asked = product(self._shardings, self.recomputations)
        return min(self._bound(self.layout("linear", how, vocab)) for vocab, how in asked)

    @property
    def placements(self) -> tuple[str, ...]:
        """The placements that there are cuts for. Raises PartitionError for named cuts that fit none."""
        if self.ranks == 1 and self.chunks is None and not self._is_named:
            return ("linear",)
        if self._is_named:
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
        free = self.choices.memory is not None and self.choices.recompute == "hints" and not self._is_named
        return next(iter(self.lines.values())).corners if free else ()

    @property
    def recomputations(self) -> tuple[Recompute, ...]:
        """What all stages recompute at first sight: as asked for, or each of the corners."""
        return self.corners or (self.choices.recompute,)

    @property
    def _shardings(self) -> tuple[Barriers, ...]:
        """What the output layer may be at first sight; two barriers are tried where one is best."""
        return tuple(vocab for vocab in self.lines if vocab != 2 or len(self.lines) == 1)

    def layout(self, placement: str, recompute: Recompute | None = None, vocab: Barriers = "off") -> Layout:
        """A layout for the microbatches as they come, before the line is cut."""
        return Layout(placement, self.ranks, self.microbatches, (), recompute or self.choices.recompute, vocab)

    @property
    def _is_named(self) -> bool:
        return find(self.schedule).name != "auto"

    def _require_room(self) -> None:
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
            self._edges[key] = choose_edges(prices.line, totals, ranks_of, Limits(self.choices.boundary_bytes))
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
            edges = [0, *places_of(prices.line, self.choices.boundary_bytes), len(prices.line.nodes)]
            best = best_cuts(LoadRow(totals, ranks_of, heaviest_piece(totals, edges)), edges)
            self._edges[key] = best and best[1]
        return self._edges[key]

    def _at_sight(self, layout: Layout, take: Callable[[Layout], Result]) -> Result:
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

    def _bound(self, layout: Layout) -> float:
        """What no order is shorter than, with the cuts of a glance, within the limit of memory; infinite if none
        fits."""
        with suppress(PartitionError, ScheduleError):
            return self._at_sight(layout, self._bound_of)
        return inf

    def _bound_of(self, layout: Layout) -> float:
        """The same with these cuts; errors as of `lay_out`."""
        costs, count, limits = self._task(layout)
        least = bound(costs, self.ranks, count, layout.placement, limits, barriers=layout.barriers)
        return float(least + (layout.microbatches - count) * _busiest(costs, layout.parsed))

    def _task(self, layout: Layout) -> tuple[Costs, int, list[float] | None]:
        """Costs, microbatches and limits of a search: of many microbatches, if that is to be brief, two a rank."""
        prices, parsed, limits = self.lines[layout.vocab], layout.parsed, None
        how = self._rows(layout), layout.recompute
        if self.choices.memory is not None:
            held = prices.held_by_any_order(parsed, layout.edges, *how)
            limits = list(_room(self.choices.memory, held, layout.placement))
        costs, count = with_messages(prices.costs(layout.edges, *how, parsed), parsed), layout.microbatches
        if self._is_huge(layout):
            count = min(count, 2 * self.ranks)
        return costs, count, limits

    def _rows(self, layout: Layout) -> float:
        """The rows of a microbatch, of those that were priced."""
        return self.rows * self.microbatches / layout.microbatches

    def _recut(self, choice: Choice, seconds: float) -> Choice:
        """The layout with its cuts moved, if they are not given, and with what each stage recomputes, if that is free,
        to where the step gets shortest: of large steps in the order that was found, of others with an order for all
        layouts that are looked at."""
        large, until = _is_large(choice.layout), time.monotonic() + seconds
        free = self.corners and not isinstance(choice.layout.recompute, tuple)
        best = self._settled(choice, until - (not large) * SEARCHING * seconds) if free else choice
        start, prices = best.layout, self.lines[choice.layout.vocab]
        looked, places = {choice.layout: choice, start: best}, self._places(prices)

        def look(layout: Layout) -> Score:
            if layout not in looked:
                looked[layout] = self.lay_out(layout)
            return 0.0, looked[layout].seconds

        def least(layout: Layout) -> Score:
            return 0.0, self._bound_of(layout)

        if not large:
            places, corners = sorted({*places, *start.edges}), prices.levels if self.corners else ()
            Descent(places, look, lambda: time.monotonic() >= until, least, corners, rounds=ROUNDS).run(start)
        elif start.microbatches == self.microbatches and places and not free:
            limits = self.choices.memory, self.choices.boundary_bytes
            with suppress(PartitionError, ScheduleError):
                look(layout_for_makespan(prices, start, choice.order, *limits))
        return _fastest(looked.values(), 1)[0]

    def _places(self, prices: LinePrices) -> list[int]:
        """Where cuts may be moved to: nowhere if they are named."""
        return places_of(prices.line, self.choices.boundary_bytes) if isinstance(self.choices.balance, str) else []

    def _settled(self, choice: Choice, until: float) -> Choice:
        """The layout with what each stage recomputes chosen for the order, or for a named one; then, as long as that
        gains, cuts and recomputation for the order that was found with them. Never a longer step."""
        prices, memory, limit = self.lines[choice.layout.vocab], self.choices.memory, self.choices.boundary_bytes
        assert memory is not None, "without a limit there are no corners"
        moving = bool(self._places(prices)) and choice.layout.microbatches == self.microbatches

        def over() -> bool:
            return time.monotonic() >= until

        def kept(order: Schedule) -> Layout:
            return keep_most(prices, choice.layout, order, memory, prices.levels, self._rows(choice.layout))

        def better(layout: Layout, order: Schedule) -> Choice:
            with suppress(PartitionError, ScheduleError):
                return _fastest([best, self.lay_out(layout, order=replace(best, order=order))], 1)[0]
            return best

        best = choice
        starts = [(kept(order), order) for order in (choice.order, *self._named_orders(choice.layout))]
        starts.sort(key=lambda each: score_of(prices, each[0], each[1], memory))
        for number, (layout, order) in enumerate(starts[:STARTS]):
            best = best if number and over() else better(layout, order)
        before = inf
        while moving and not over() and best.seconds < before * (1 - GAIN):
            before, how = best.seconds, (memory, limit, prices.levels, over)
            best = better(layout_for_makespan(prices, best.layout, best.order, *how), best.order)
        return best

    def _named_orders(self, layout: Layout) -> list[Schedule]:
        """Those that there are on its placement, whatever they hold; none of steps of which only a part is ordered."""
        costs, count, _ = self._task(layout)
        if count < layout.microbatches or _is_large(layout):
            return []
        task = costs, self.ranks, count, None, layout.placement, layout.barriers, PATIENCE, 0
        return [order for _, order in cached_search(*task, keep=False).named]

    def _least_steps(self, layout: Layout) -> Iterator[Layout]:
        """Layouts of a line whose steps could be shortest within the limit of memory, if an order for them is found:
        of stages that choose what they recompute, and of those that all do the same."""
        prices, memory, asked = self.lines[layout.vocab], self.choices.memory, layout.recompute
        edges = sorted({*self._places(prices)} & {*prices.blocks})
        if memory is None or self._is_named or layout.parsed.stages > self.ranks or isinstance(asked, tuple):
            return
        least = LeastStep(prices, self.ranks, self.microbatches, memory, edges, self.rows)
        alike = zip(prices.levels[::5] if self.corners else (asked,))
        freely = ((prices.levels, each) for each in SLACKS if self.corners)
        for number, (policies, slack) in enumerate((*freely, *product(alike, (0.0,)))):
            if (found := least.least(policies, slack)) is None and not number:
                return  # what asks for more does not fit either
            if found is not None:
                cuts, chosen = zip(*((part.begin, part.policy) for part in found[1]), strict=True)
                yield replace(layout, edges=cuts[1:], recompute=chosen if self.corners else asked)

    def _searched(self, choice: Choice, seconds: float, lean: bool) -> Choice:
        """The layout with a better order, if the time suffices to look at more than the glance did; else, if it is to
        be `lean`, with one of those that hold least."""
        proven = choice.seconds <= choice.bound * ROUNDING
        if is_partial(choice) or self._took[choice.layout] > seconds or proven:
            return self.lay_out(choice.layout, lean=True, order=choice) if lean and _is_large(choice.layout) else choice
        return self.lay_out(choice.layout, seconds, order=choice)


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


def _fastest(choices: Iterable[Choice], count: int | None = None) -> list[Choice]:
    """The choices sorted by seconds (what a sharded output layer gains must be worth it), then bytes."""

    def rank(choice: Choice) -> tuple[float, float]:
        return rounded(choice.seconds / (1 if choice.layout.vocab == "off" else WORTH)), max(choice.peak)

    return sorted(choices, key=rank)[:count]


def _starts(choices: Iterable[Choice]) -> list[Choice]:
    """The fastest, of each placement with one recomputation: a descent changes that itself."""
    fastest = _fastest(choices)
    alike = {replace(c.layout, recompute="off", edges=()): c for c in reversed(fastest)}
    return [choice for choice in fastest if choice in alike.values()]


def _leading(choices: Iterable[Choice]) -> list[str]:
    """The placements that are fastest with the output layer whole, if enough of them fit."""
    found = list(dict.fromkeys(each.layout.placement for each in _fastest(choices) if each.layout.vocab == "off"))
    return found[:SEARCHED] if len(found) >= SEARCHED else []


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


def _room(memory: float, resident: Sequence[float], placement: str) -> Iterator[float]:
    """What each rank has left for activations."""
    for rank, held in enumerate(resident):
        if held >= memory:
            raise PartitionError(
                f"placement {placement}: parameters, gradients, optimizer state, messages and the pass that runs take "
                f"{held:,.0f} bytes on rank {rank}, {held - memory:,.0f} more than memory={memory:.15g}"
            )
        yield memory - held
