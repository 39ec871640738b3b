"""Layouts: every sensible way to place, cut and order a captured step on some ranks, priced without compiling it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

from zbcompile.compiler.cut_planning import first_microbatches, places_of, stages_for_makespan
from zbcompile.compiler.descent import Descent, Score, Stages
from zbcompile.passes.compile_options import Choices, Recompute
from zbcompile.passes.errors import PartitionError
from zbcompile.planning.layout_question import Layout, Question
from zbcompile.planning.search_cache import cached_search
from zbcompile.schedules import Costs, Placement, ScheduleError, Timeline, bound, simulate
from zbcompile.schedules.execution.memory import with_messages

GLANCE = 100  # moves for a first look at a layout; names and rules of preference say most of it
MANY = 100  # stages x microbatches, from which on a move takes so long that there are fewer,
HUGE = 2000  # and from which on there are none
PATIENCE = 600.0  # seconds that a glance may take; what counts are its moves, on a busy machine too
FINALISTS = 3  # layouts whose cuts are moved
MOVING = 0.7  # share of the time that they get
ROUNDS = 2  # from far moves of cuts to near ones
IMPOSSIBLE = (inf, inf)
SEARCHED = 2  # of which so many get the rest of the time


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
    costs, ranks, count, name, limits = _task(question, placement, edges, microbatches, choices)
    size = costs.stages * microbatches
    moves = None if seconds else 0 if size > HUGE else GLANCE // (1 + size // MANY)
    barriers, seconds = barriers_of(choices), seconds or PATIENCE
    keep = choices.balance != "measured"
    found = cached_search(costs, ranks, count, limits, name, barriers, seconds, moves, keep)
    whole = (
        found.objective + (microbatches - count) * _pace(found.simulation) if count < microbatches else found.objective
    )
    line, how = question.costs(choices), _how(question, microbatches, choices)
    peak = line.most_held(found.schedule, edges, *how)
    resident = line.always_held(found.schedule.placement, edges, how[0])
    return Layout(placement, microbatches, choices, tuple(edges), resident, peak, found, float(whole))


def _pace(timeline: Timeline) -> float:
    """Seconds for each further microbatch in the same order."""
    count = timeline.schedule.microbatches
    half = simulate(first_microbatches(timeline.schedule, count // 2), timeline.costs)
    return max(timeline.work / count, (timeline.makespan - half.makespan) / (count - count // 2))


def _task(
    question: Question, placement: str, edges: Sequence[int], microbatches: int, choices: Choices
) -> tuple[Costs, int, int, str, list[float] | None]:
    """What `search` and `bound` are asked: of many microbatches, if that is to be brief, two for each rank."""
    line, how = question.costs(choices), _how(question, microbatches, choices)
    parsed, limits = Placement.parse(placement, question.ranks), None
    if choices.memory is not None:
        limits = list(_room(choices.memory, line.held_by_any_order(parsed, edges, *how), placement))
    costs, count = with_messages(line.costs(edges, *how), parsed), microbatches
    if question.brief and costs.stages * count > HUGE:
        count = min(count, 2 * question.ranks)
    return costs, question.ranks, count, placement, limits


def barriers_of(choices: Choices) -> int:
    """Between the last stage's forward and its backward, if the output layer is sharded."""
    return choices.vocab if isinstance(choices.vocab, int) else 1


def _how(question: Question, microbatches: int, choices: Choices) -> tuple[float, Recompute]:
    """The rows of a microbatch, of those as they come, and what is recomputed."""
    return question.microbatches / microbatches, choices.recompute


def _room(memory: float, resident: Sequence[float], placement: str) -> Iterator[float]:
    """What each rank has left for activations."""
    for rank, held in enumerate(resident):
        if held >= memory:
            raise PartitionError(
                f"placement {placement}: parameters, gradients, optimizer state, messages and the pass that runs take "
                f"{held:,.0f} bytes on rank {rank}, {held - memory:,.0f} more than memory={memory:.15g}"
            )
        yield memory - held


def _recut(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with its cuts moved, if they are not given, and with what each stage recomputes, if that is free, to
    where the step gets shortest: of large steps in the order that was found, of others with an order for all stages
    that are looked at."""
    choices, until = layout.choices, time.monotonic() + seconds
    line, placement, count = question.costs(choices), layout.placement, layout.microbatches
    start = Stages(layout.edges)
    if corners := question.corners:
        start = Stages(layout.edges, tuple(map(choices.recompute_of, range(len(layout.edges) + 1))))
    found = {start: layout}

    def choices_of(stages: Stages) -> Choices:
        return replace(choices, recompute=stages.recompute) if stages.recompute else choices

    def least(stages: Stages) -> Score:
        with suppress(PartitionError, ScheduleError):
            return 0.0, _bound_of(question, placement, stages.edges, count, choices_of(stages))
        return IMPOSSIBLE

    def look(stages: Stages) -> Score:
        with suppress(PartitionError, ScheduleError):
            if stages not in found:
                found[stages] = lay_out(question, placement, stages.edges, count, choices_of(stages))
            return 0.0, found[stages].seconds
        return IMPOSSIBLE

    places = places_of(line.line, choices.boundary_bytes) if isinstance(choices.balance, str) else []
    if layout.schedule.stages * count <= HUGE:
        places = sorted({*places, *layout.edges})
        Descent(places, look, lambda: time.monotonic() >= until, least, corners, ROUNDS).run(start)
    elif count == question.microbatches and places:
        limits = choices.memory, choices.boundary_bytes, corners
        look(stages_for_makespan(line, start, layout.schedule, *limits))
    return _fastest(found.values(), 1)[0]


def _is_partial(layout: Layout) -> bool:
    """Whether only the first microbatches were ordered."""
    return layout.found.schedule.microbatches < layout.microbatches


def _searched(question: Question, layout: Layout, seconds: float) -> Layout:
    """The layout with a better order, if the time suffices to look at more than the glance did."""
    if _is_partial(layout) or layout.found.seconds > seconds or layout.found.proven:
        return layout
    return lay_out(question, layout.placement, layout.edges, layout.microbatches, layout.choices, seconds)
