"""Layouts: every sensible way to place, cut and order a captured step on some ranks, priced without compiling it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.compiler.makespan_cuts import cuts_for_makespan
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.search import Limits, choose_edges
from zbcompile.schedules import Costs, Found, Placement, Schedule, ScheduleError, search
from zbcompile.schedules.searching.problem import Problem
from zbcompile.schedules.searching.starting_orders import one_by_one

PLACEMENTS = ("linear", "looped:2", "v", "looped:4")
GLANCE = 100  # moves for a first look at a layout; names and rules of preference say most of it
FINALISTS = 3  # layouts whose cuts are moved
SEARCHED = 2  # of which so many get the rest of the time


@dataclass(frozen=True)
class Layout:
    """One way to lay a step out: the cuts, the order that was found for them, and what the ranks hold all the time."""

    placement: str
    microbatches: int
    choices: Choices
    edges: tuple[int, ...]
    resident: tuple[float, ...]
    found: Found

    @property
    def seconds(self) -> float:
        return float(self.found.objective)

    @property
    def schedule(self) -> Schedule:
        return self.found.schedule

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes that each rank holds."""
        waiting = self.found.simulation.peak_memory
        return tuple(w + r for w, r in zip(waiting, self.resident, strict=True))

    def __str__(self) -> str:
        return f"placement {self.placement}, {self.microbatches} microbatches, recompute={self.choices.recompute}"


@dataclass(frozen=True)
class Question:
    """What is laid out: `costs` of microbatches as they come if the batch has `microbatches` of them, the other
    `counts` that it can be split into, the `ranks`, what the user has chosen already, and `chunks` if given."""

    costs: LineCosts
    ranks: int
    microbatches: int
    choices: Choices
    counts: tuple[int, ...] = ()
    chunks: int | None = None

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


def find_layouts(
    question: Question, seconds: float, announce: Callable[[str], None] = lambda text: None
) -> list[Layout]:
    """All layouts that fit, the fastest first. Raises PartitionError if none does: it says on which rank, and how much
    is missing."""
    reasons: list[str] = []
    looked: list[Layout] = []

    def look(placement: str, microbatches: int, choices: Choices) -> None:
        announce(f"placement {placement}, {microbatches} microbatches")
        try:
            looked.append(_glance(question, placement, microbatches, choices, seconds))
        except (PartitionError, ScheduleError) as error:
            reasons.append(str(error))

    for placement in question.placements:
        for choices in question.recomputations:
            look(placement, question.microbatches, choices)
    for layout in _fastest(looked, SEARCHED):
        for count in question.counts:
            if count != question.microbatches:
                look(layout.placement, count, layout.choices)
    if not looked:
        raise PartitionError("no layout fits: " + "; ".join(dict.fromkeys(reasons)))
    finalists = [_recut(question, layout, seconds) for layout in _fastest(looked, FINALISTS)]
    finalists = [_searched(question, layout, seconds / SEARCHED) for layout in _fastest(finalists, SEARCHED)]
    others = [layout for layout in looked if str(layout) not in set(map(str, finalists))]
    return _fastest([*finalists, *others])


def _fastest(layouts: Iterable[Layout], count: int | None = None) -> list[Layout]:
    return sorted(layouts, key=lambda layout: (layout.seconds, max(layout.peak)))[:count]


def _glance(question: Question, name: str, microbatches: int, choices: Choices, seconds: float) -> Layout:
    """A layout with cuts into equal parts; if that holds too much, with those that hold least."""
    placement = Placement.parse(name, question.ranks)
    edges = _edges(question, placement, choices)
    try:
        return _laid_out(question, name, edges, microbatches, choices, seconds / 10, GLANCE)
    except ScheduleError:
        if not isinstance(choices.balance, str):
            raise
        lean = Problem(placement, microbatches, question.costs.costs(edges))
        order = lean.schedule(one_by_one(lean))
        return _laid_out(
            question, name, _moved(question, edges, order, choices), microbatches, choices, seconds / 10, GLANCE
        )


def _edges(question: Question, placement: Placement, choices: Choices) -> list[int]:
    costs = question.costs
    if not isinstance(choices.balance, str):
        return edges_named(costs.line, choices.balance, placement.stages)
    ranks_of = [placement.rank(stage) for stage in range(placement.stages)]
    return choose_edges(costs.line, [0.0, *accumulate(costs.loads)], ranks_of, Limits(choices.boundary_bytes))


def _laid_out(
    question: Question,
    placement: str,
    edges: Sequence[int],
    microbatches: int,
    choices: Choices,
    seconds: float,
    moves: int | None,
) -> Layout:
    resident = question.costs.resident(edges, Placement.parse(placement, question.ranks))
    costs = _costs(question, edges, microbatches, choices)
    limits = None if choices.memory is None else list(_room(choices.memory, resident, placement))
    barriers = choices.vocab if isinstance(choices.vocab, int) else 1
    found = search(
        *(costs, question.ranks, microbatches, limits, (placement,)), barriers=barriers, seconds=seconds, moves=moves
    )
    return Layout(placement, microbatches, choices, tuple(edges), resident, found)


def _costs(question: Question, edges: Sequence[int], microbatches: int, choices: Choices) -> Costs:
    rows = question.microbatches / microbatches
    return question.costs.costs(edges, rows, choices.recompute == "full")


def _room(memory: float, resident: Sequence[float], placement: str) -> Iterator[float]:
    """What each rank has left for activations."""
    for rank, held in enumerate(resident):
        if held >= memory:
            raise PartitionError(
                f"placement {placement}: parameters, gradients and optimizer state of rank {rank} take {held:,.0f} "
                f"bytes, {held - memory:,.0f} more than memory={memory:.15g}"
            )
        yield memory - held


def _moved(question: Question, edges: Sequence[int], schedule: Schedule, choices: Choices) -> list[int]:
    return cuts_for_makespan(
        question.costs, edges, schedule, choices.memory, choices.boundary_bytes, choices.recompute == "full"
    )


def _recut(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with its cuts moved for its own order; as it was if that gains nothing, or if the cuts are given."""
    if not isinstance(layout.choices.balance, str) or layout.microbatches != question.microbatches:
        return layout
    edges = _moved(question, layout.edges, layout.schedule, layout.choices)
    if tuple(edges) == layout.edges:
        return layout
    moved = _laid_out(question, layout.placement, edges, layout.microbatches, layout.choices, seconds / 10, GLANCE)
    return _fastest([layout, moved], 1)[0]


def _searched(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with a better order, if the time suffices to find one."""
    return _laid_out(question, layout.placement, layout.edges, layout.microbatches, layout.choices, seconds, None)
