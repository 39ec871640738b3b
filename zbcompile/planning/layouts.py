"""Layouts: every sensible way to place, cut and order a captured step on some ranks, priced without compiling it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.compiler.makespan_cuts import cuts_for_makespan, first_microbatches, places_of
from zbcompile.compiler.vocabulary_decision import WORTH
from zbcompile.passes.compile_options import Barriers, Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.balance import Row, best_cuts, heaviest_piece
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.search import Limits, choose_edges
from zbcompile.planning.cuts_with_orders import cuts_with_orders
from zbcompile.planning.search_cache import cached_search
from zbcompile.schedules import Costs, Found, Placement, Schedule, ScheduleError, Timeline, bound, simulate

PLACEMENTS = ("linear", "looped:2", "v", "looped:4")
GLANCE = 100  # moves for a first look at a layout; names and rules of preference say most of it
MANY = 100  # stages x microbatches, from which on a move takes so long that there are fewer,
HUGE = 2000  # and from which on there are none
PATIENCE = 600.0  # seconds that a glance may take; what counts are its moves, on a busy machine too
FINALISTS = 3  # layouts whose cuts are moved
MOVING = 0.7  # share of the time that they get
SEARCHED = 2  # of which so many get the rest of the time


@dataclass(frozen=True)
class Layout:
    """One way to lay a step out: the cuts, the order that was found for them (of a question that is `brief`, for the
    first microbatches alone), what the ranks hold all the time, and the seconds of the step."""

    placement: str
    microbatches: int
    choices: Choices
    edges: tuple[int, ...]
    resident: tuple[float, ...]
    found: Found
    seconds: float

    @property
    def bubble(self) -> float:
        """The share of the step in which its busiest rank waits."""
        work = self.found.simulation.work * self.microbatches / self.found.schedule.microbatches
        return 1 - work / self.seconds if self.seconds else 0.0

    @property
    def schedule(self) -> Schedule:
        return self.found.schedule

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes that each rank holds."""
        waiting = self.found.simulation.peak_memory
        return tuple(w + r for w, r in zip(waiting, self.resident, strict=True))

    def __str__(self) -> str:
        sharded = f", vocab={self.choices.vocab}" if self.choices.vocab != "off" else ""
        shown = f"placement {self.placement}, {self.microbatches} microbatches, recompute={self.choices.recompute}"
        return shown + sharded

    @property
    def rank(self) -> tuple[float, float]:
        """The less, the better: seconds (what a sharded output layer gains must be worth it), then bytes."""
        return self.seconds / (1 if self.choices.vocab == "off" else WORTH), max(self.peak)


@dataclass(frozen=True)
class Question:
    """What is laid out: `lines`, by `vocab=`, are the costs of microbatches as they come if the batch has
    `microbatches` of them, `counts` the other numbers that it can be split into; the `ranks`, what the user has chosen
    already, and `chunks` if given. `brief`: of large steps only the first microbatches are ordered and simulated, and
    the rest follows at the same pace."""

    lines: Mapping[Barriers, LineCosts]
    ranks: int
    microbatches: int
    choices: Choices
    counts: tuple[int, ...] = ()
    chunks: int | None = None
    brief: bool = False

    @property
    def placements(self) -> tuple[str, ...]:
        """The placements that there are cuts for. Raises PartitionError for named cuts that fit none."""
        if self.ranks == 1 and self.chunks is None:
            return ("linear",)
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

    @property
    def recomputations(self) -> tuple[Choices, ...]:
        """As asked for; under a limit of memory also with everything recomputed, unless something else was asked."""
        more = self.choices.memory is not None and self.choices.recompute == "hints"
        return (self.choices, replace(self.choices, recompute="full")) if more else (self.choices,)

    @property
    def shardings(self) -> tuple[Barriers, ...]:
        """What the output layer may be at first sight; two barriers are tried where one is best."""
        return tuple(vocab for vocab in self.lines if vocab != 2 or len(self.lines) == 1)

    def costs(self, choices: Choices) -> LineCosts:
        return self.lines[choices.vocab]

    def require_room(self) -> None:
        """Raise PartitionError if what the ranks hold all the time is more than they have together."""
        room, least = self.choices.memory, min(map(self._held, self.lines.values())) / self.ranks
        if room is not None and least > room:
            raise PartitionError(
                f"no layout fits: rank 0 holds {least:,.0f} bytes of parameters, gradients and optimizer state if all "
                f"{self.ranks} ranks hold equally much, {least - room:,.0f} more than memory={room:.15g}"
            )

    def _held(self, costs: LineCosts) -> float:
        """By all ranks together."""
        return costs.resident((), Placement("linear", 1, 1))[0] + (self.ranks - 1) * costs.shard_bytes

    def cuts(self, placement: str, choices: Choices) -> list[int]:
        """Those that `balance=` names, else cuts into equal parts."""
        costs, parsed = self.costs(choices), Placement.parse(placement, self.ranks)
        if not isinstance(choices.balance, str):
            return edges_named(costs.line, choices.balance, parsed.stages)
        key = placement, id(costs.line)
        if key not in self._equal:
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            totals = [0.0, *accumulate(costs.loads)]
            self._equal[key] = choose_edges(costs.line, totals, ranks_of, Limits(choices.boundary_bytes))
        return self._equal[key]

    def lean_cuts(self, placement: str, choices: Choices) -> list[int] | None:
        """Those whose fullest rank holds least with one microbatch; None if there are none."""
        costs, parsed = self.costs(choices), Placement.parse(placement, self.ranks)
        recompute = choices.recompute == "full"
        key = placement, id(costs.line), recompute
        if key not in self._lean:
            totals = costs.held_before(recompute)
            ranks_of = [parsed.rank(stage) for stage in range(parsed.stages)]
            edges = [0, *places_of(costs.line, choices.boundary_bytes), len(costs.line.nodes)]
            best = best_cuts(Row(totals, ranks_of, heaviest_piece(totals, edges)), edges)
            self._lean[key] = best and best[1]
        return self._lean[key]

    @cached_property
    def _lean(self) -> dict[tuple[str, int, bool], list[int] | None]:
        return {}

    @cached_property
    def _equal(self) -> dict[tuple[str, int], list[int]]:
        return {}


def find_layouts(
    question: Question, seconds: float, announce: Callable[[str], None] = lambda text: None
) -> list[Layout]:
    """All layouts that fit, the fastest first. Raises PartitionError if none does: it says on which rank, and how much
    is missing."""
    question.require_room()
    reasons: list[str] = []
    looked: list[Layout] = []

    def look(placement: str, microbatches: int, choices: Choices) -> Layout | None:
        announce(f"placement {placement}, {microbatches} microbatches")
        try:
            looked.append(_glance(question, placement, microbatches, choices))
        except (PartitionError, ScheduleError) as error:
            reasons.append(str(error))
            return None
        return looked[-1]

    for vocab, placement in product(question.shardings, question.placements):
        if question.brief and vocab != "off" and placement not in (_leading(looked) or question.placements):
            continue
        asked, count = [replace(choices, vocab=vocab) for choices in question.recomputations], question.microbatches
        bounds = [_bound(question, placement, each, count) for each in asked] if len(asked) > 1 else [0.0]
        layout = None
        for choices, least in sorted(zip(asked, bounds, strict=True), key=lambda each: each[1]):
            if layout is None or least < layout.seconds:
                layout = look(placement, question.microbatches, choices) or layout
    for layout in _fastest(looked, SEARCHED):
        if layout.choices.vocab == 1 and 2 in question.lines:
            look(layout.placement, layout.microbatches, replace(layout.choices, vocab=2))
    for layout in _fastest(looked, SEARCHED):
        for count in question.counts:
            if count != question.microbatches and _may_gain(question, layout, count):
                look(layout.placement, count, layout.choices)
    if not looked:
        raise PartitionError("no layout fits: " + "; ".join(dict.fromkeys(reasons)))
    several = not _is_partial(_fastest(looked)[0])  # a score of cuts of a large step takes a while
    finalists, until = _fastest(looked, FINALISTS if several else 1), time.monotonic() + MOVING * seconds
    for number, layout in enumerate(finalists):
        announce(f"cuts of {layout}")
        finalists[number] = _recut(question, layout, (until - time.monotonic()) / (len(finalists) - number))
    each = (1 - MOVING) * seconds / SEARCHED
    finalists = [_searched(question, layout, each) for layout in _fastest(finalists, SEARCHED)]
    others = [layout for layout in looked if str(layout) not in set(map(str, finalists))]
    return _fastest([*finalists, *others])


def _leading(layouts: Sequence[Layout]) -> list[str]:
    """The placements that are fastest with the output layer whole, if enough of them fit."""
    found = list(dict.fromkeys(each.placement for each in _fastest(layouts) if each.choices.vocab == "off"))
    return found[:SEARCHED] if len(found) >= SEARCHED else []


def _fastest(layouts: Iterable[Layout], count: int | None = None) -> list[Layout]:
    return sorted(layouts, key=lambda layout: layout.rank)[:count]


def _may_gain(question: Question, layout: Layout, microbatches: int) -> bool:
    """Whether another number of microbatches is worth a look; one that is not brief may also come close."""
    least = _bound(question, layout.placement, layout.choices, microbatches) if question.brief else 0.0
    return least < layout.seconds


def _bound(question: Question, placement: str, choices: Choices, microbatches: int) -> float:
    """What no order is shorter than, with the cuts of a glance, within the limit of memory; infinite if none fits."""
    for cuts in (question.cuts, question.lean_cuts):
        with suppress(PartitionError, ScheduleError):
            if (edges := cuts(placement, choices)) is not None:
                return _bound_of(question, placement, edges, microbatches, choices)
    return inf


def _bound_of(question: Question, placement: str, edges: Sequence[int], microbatches: int, choices: Choices) -> float:
    """The same with these cuts; errors as of `lay_out`."""
    task = costs, ranks, count, name, _ = _task(question, placement, edges, microbatches, choices)
    least = bound(*task, barriers=barriers_of(choices))
    return float(least + (microbatches - count) * _busiest(costs, ranks, name))


def _busiest(costs: Costs, ranks: int, placement: str) -> float:
    """Seconds that the busiest rank works on a microbatch."""
    work, parsed = [0.0] * ranks, Placement.parse(placement, ranks)
    for stage, passes in enumerate(zip(costs.forward, costs.backward, costs.weight, strict=True)):
        work[parsed.rank(stage)] += sum(passes)
    return max(work)


def _glance(question: Question, name: str, microbatches: int, choices: Choices) -> Layout:
    """A layout with cuts into equal parts; if that holds too much, with those that hold least."""
    try:
        return lay_out(question, name, question.cuts(name, choices), microbatches, choices)
    except (ScheduleError, PartitionError):
        edges = question.lean_cuts(name, choices) if isinstance(choices.balance, str) else None
        if edges is None:
            raise
        return lay_out(question, name, edges, microbatches, choices)


def lay_out(
    question: Question,
    placement: str,
    edges: Sequence[int],
    microbatches: int,
    choices: Choices,
    seconds: float | None = None,
) -> Layout:
    """The layout with these cuts, its order found within so many seconds, or at a glance. Raises PartitionError or
    ScheduleError if it does not fit."""
    resident = question.costs(choices).resident(edges, Placement.parse(placement, question.ranks))
    costs, ranks, count, name, limits = _task(question, placement, edges, microbatches, choices)
    size = costs.stages * microbatches
    moves = None if seconds else 0 if size > HUGE else GLANCE // (1 + size // MANY)
    barriers, seconds = barriers_of(choices), seconds or PATIENCE
    keep = choices.balance != "measured"
    found = cached_search(costs, ranks, count, limits, name, barriers, seconds, moves, keep)
    whole = (
        found.objective + (microbatches - count) * _pace(found.simulation) if count < microbatches else found.objective
    )
    return Layout(placement, microbatches, choices, tuple(edges), resident, found, float(whole))


def _pace(timeline: Timeline) -> float:
    """Seconds for each further microbatch in the same order."""
    count = timeline.schedule.microbatches
    half = simulate(first_microbatches(timeline.schedule, count // 2), timeline.costs)
    return max(timeline.work / count, (timeline.makespan - half.makespan) / (count - count // 2))


def _task(
    question: Question, placement: str, edges: Sequence[int], microbatches: int, choices: Choices
) -> tuple[Costs, int, int, str, list[float] | None]:
    """What `search` and `bound` are asked: of many microbatches, if that is to be brief, two for each rank."""
    resident = question.costs(choices).resident(edges, Placement.parse(placement, question.ranks))
    limits = None if choices.memory is None else list(_room(choices.memory, resident, placement))
    costs, count = _costs(question, edges, microbatches, choices), microbatches
    if question.brief and costs.stages * count > HUGE:
        count = min(count, 2 * question.ranks)
    return costs, question.ranks, count, placement, limits


def barriers_of(choices: Choices) -> int:
    """Between the last stage's forward and its backward, if the output layer is sharded."""
    return choices.vocab if isinstance(choices.vocab, int) else 1


def _costs(question: Question, edges: Sequence[int], microbatches: int, choices: Choices) -> Costs:
    rows = question.microbatches / microbatches
    return question.costs(choices).costs(edges, rows, choices.recompute == "full")


def _room(memory: float, resident: Sequence[float], placement: str) -> Iterator[float]:
    """What each rank has left for activations."""
    for rank, held in enumerate(resident):
        if held >= memory:
            raise PartitionError(
                f"placement {placement}: parameters, gradients and optimizer state of rank {rank} take {held:,.0f} "
                f"bytes, {held - memory:,.0f} more than memory={memory:.15g}"
            )
        yield memory - held


def _recut(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with its cuts moved to where the step gets shortest, if they are not given: of large steps in the
    order that was found, of others with an order for every cut that is looked at."""
    choices, found, until = layout.choices, {layout.edges: layout}, time.monotonic() + seconds
    line, placement, count = question.costs(choices), layout.placement, layout.microbatches
    if not isinstance(choices.balance, str):
        return layout

    def least(edges: tuple[int, ...]) -> float:
        with suppress(PartitionError, ScheduleError):
            return _bound_of(question, placement, edges, count, choices)
        return inf

    def look(edges: tuple[int, ...]) -> float:
        with suppress(PartitionError, ScheduleError):
            if edges not in found:
                found[edges] = lay_out(question, placement, edges, count, choices)
            return found[edges].seconds
        return inf

    if layout.schedule.stages * count <= HUGE:
        places = places_of(line.line, choices.boundary_bytes)
        cuts_with_orders(layout.edges, places, least, look, lambda: time.monotonic() >= until)
    elif count == question.microbatches:
        limits = choices.memory, choices.boundary_bytes, choices.recompute == "full"
        look(tuple(cuts_for_makespan(line, layout.edges, layout.schedule, *limits)))
    return _fastest(found.values(), 1)[0]


def _is_partial(layout: Layout) -> bool:
    """Whether only the first microbatches were ordered."""
    return layout.found.schedule.microbatches < layout.microbatches


def _searched(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with a better order, if the time suffices to look at more than the glance did."""
    if _is_partial(layout) or layout.found.seconds > seconds or layout.found.proven:
        return layout
    return lay_out(question, layout.placement, layout.edges, layout.microbatches, layout.choices, seconds)
