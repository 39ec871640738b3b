"""The search for the fastest layouts: a glance at each, then cuts, recomputation and orders of the best."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

from zbcompile import schedules
from zbcompile.compiler.cut_planning import keep_most, layout_for_makespan, score_of
from zbcompile.compiler.descent import GAIN, Descent, Score
from zbcompile.compiler.vocabulary_sharding import WORTH
from zbcompile.passes.errors import PartitionError
from zbcompile.planning.layouts import PATIENCE, LayoutSearch, is_large, rounded
from zbcompile.planning.least_step import LeastStep
from zbcompile.program.choice import Choice, Layout
from zbcompile.progress import Say, silent
from zbcompile.schedules import Schedule, ScheduleError
from zbcompile.schedules.searching.problem import ROUNDING

FINALISTS = 3  # layouts whose cuts are moved
MOVING = 0.7  # share of the time that they get
SEARCHING = 0.5  # share of these seconds that is left for moves with an order for each
ROUNDS = 2  # from far moves of cuts to near ones
STARTS = 3  # orders for which it is chosen what stages recompute
SEARCHED = 2  # layouts that get the rest of the time
SLACKS = (0, 0.5, 0.75, 1, 1.25, 1.5)  # of round trips: orders that are found need some


def fastest_layouts(search: LayoutSearch, seconds: float, announce: Say = silent) -> list[Choice]:
    """All layouts that fit, the fastest first. Raises PartitionError if none does: it says on which rank, and how
    much is missing."""
    search.require_room()
    looked = _looked_at(search, announce)
    if search.is_named:
        return _fastest(looked)
    several = not _is_partial(_fastest(looked)[0])  # a score of cuts of a large step takes a while
    finalists, until = _starts(looked)[: FINALISTS if several else 1], time.monotonic() + MOVING * seconds
    for number, choice in enumerate(finalists):
        announce(f"cuts of {choice.layout}")
        finalists[number] = _recut(search, choice, (until - time.monotonic()) / (len(finalists) - number))
    finalists = _fastest(finalists, SEARCHED)
    each = (1 - MOVING) * seconds / len(finalists)
    finalists = [_searched(search, choice, each, not n) for n, choice in enumerate(finalists)]
    known = {str(choice.layout) for choice in finalists}
    return _fastest([*finalists, *(choice for choice in looked if str(choice.layout) not in known)])


def _looked_at(search: LayoutSearch, announce: Say) -> list[Choice]:
    """Every layout that is worth a glance, and fits."""
    reasons: list[str] = []
    looked: list[Choice] = []

    def look(layout: Layout) -> Choice | None:
        announce(f"placement {layout.placement}, {layout.microbatches} microbatches")
        try:
            looked.append(search.at_sight(layout, search.lay_out))
        except (PartitionError, ScheduleError) as error:
            reasons.append(str(error))
            return None
        return looked[-1]

    for vocab, placement in product(search.shardings, search.placements):
        if search.brief and vocab != "off" and placement not in (_leading(looked) or search.placements):
            continue
        asked = [search.layout(placement, each, vocab) for each in search.recomputations]
        asked += [] if search.brief else _least_steps(search, search.layout(placement, vocab=vocab))
        bounds = [search.bound(each) for each in asked] if len(asked) > 1 else [0.0]
        choice = None
        for layout, least in sorted(zip(asked, bounds, strict=True), key=lambda each: each[1]):
            first = min(looked, key=lambda each: each.seconds, default=None) if search.is_huge(layout) else choice
            if first is None or least < _aim(search, first):
                choice = min(filter(None, (choice, look(layout))), key=lambda each: each.seconds, default=None)
    for choice in _fastest(looked, SEARCHED):
        if choice.layout.vocab == 1 and 2 in search.lines:
            look(replace(choice.layout, vocab=2))
    for choice in _fastest(looked, SEARCHED):
        for count in search.counts:
            other = replace(choice.layout, microbatches=count)
            if count != search.microbatches and (not search.brief or search.bound(other) < _aim(search, choice)):
                look(other)
    if not looked:
        raise PartitionError("no layout fits: " + "; ".join(dict.fromkeys(reasons)))
    return looked


def _aim(search: LayoutSearch, choice: Choice) -> float:
    """What the bound of a layout must be below if it is to be looked at after this one: the step that was found or,
    where a glance takes long, its bound, as if all orders were as far above theirs."""
    return choice.bound if search.is_huge(choice.layout) else choice.seconds


def _recut(search: LayoutSearch, choice: Choice, seconds: float) -> Choice:
    """The layout with its cuts moved, if they are not given, and with what each stage recomputes, if that is free,
    to where the step gets shortest: of large steps in the order that was found, of others with an order for all
    layouts that are looked at."""
    large, until = is_large(choice.layout), time.monotonic() + seconds
    free = search.corners and not isinstance(choice.layout.recompute, tuple)
    best = _settled(search, choice, until - (not large) * SEARCHING * seconds) if free else choice
    start, prices = best.layout, search.lines[choice.layout.vocab]
    looked, places = {choice.layout: choice, start: best}, search.places(prices)
    if large:
        if start.microbatches == search.microbatches and places and not free:
            with suppress(PartitionError, ScheduleError):
                moved = search.lay_out(layout_for_makespan(prices, start, choice.order, search.choices.memory))
                return _fastest([best, moved], 1)[0]
        return best

    def look(layout: Layout) -> Score:
        if layout not in looked:
            looked[layout] = search.lay_out(layout, lean=False)
        return 0.0, looked[layout].seconds

    def least(layout: Layout) -> Score:
        return 0.0, search.bound_of(layout)

    places, corners = sorted({*places, *start.edges}), prices.levels if search.corners else ()
    Descent(places, look, lambda: time.monotonic() >= until, least, corners, rounds=ROUNDS).run(start)
    found = _fastest(looked.values(), 1)[0]
    return found if found in (choice, best) else search.lay_out(found.layout, order=found)


def _settled(search: LayoutSearch, choice: Choice, until: float) -> Choice:
    """The layout with what each stage recomputes chosen for the order, or for a named one; then, as long as that
    gains, cuts and recomputation for the order that was found with them. Never a longer step."""
    prices, memory = search.lines[choice.layout.vocab], search.choices.memory
    assert memory is not None, "without a limit there are no corners"
    moving = bool(search.places(prices)) and choice.layout.microbatches == search.microbatches

    def over() -> bool:
        return time.monotonic() >= until

    def kept(order: Schedule) -> Layout:
        return keep_most(prices, choice.layout, order, memory, prices.levels, search.rows_of(choice.layout))

    def better(layout: Layout, order: Schedule) -> Choice:
        with suppress(PartitionError, ScheduleError):
            return _fastest([best, search.lay_out(layout, order=replace(best, order=order))], 1)[0]
        return best

    best = choice
    starts = [(kept(order), order) for order in (choice.order, *_named_orders(search, choice.layout))]
    starts.sort(key=lambda each: score_of(prices, each[0], each[1], memory))
    for number, (layout, order) in enumerate(starts[:STARTS]):
        best = best if number and over() else better(layout, order)
    before = inf
    while moving and not over() and best.seconds < before * (1 - GAIN):
        before, how = best.seconds, (memory, prices.levels, over)
        best = better(layout_for_makespan(prices, best.layout, best.order, *how), best.order)
    return best


def _named_orders(search: LayoutSearch, layout: Layout) -> list[Schedule]:
    """Those that there are on its placement, whatever they hold; none of steps of which only a part is ordered."""
    costs, count, _ = search.task(layout)
    if count < layout.microbatches or is_large(layout):
        return []
    task = costs, search.ranks, count, None, (layout.placement,)
    found = schedules.search(*task, barriers=layout.barriers, seconds=PATIENCE, moves=0, lean=False)
    return [order for _, order in found.named]


def _least_steps(search: LayoutSearch, layout: Layout) -> Iterator[Layout]:
    """Layouts of a line whose steps could be shortest within the limit of memory, if an order for them is found:
    of stages that choose what they recompute, and of those that all do the same."""
    prices, memory, asked = search.lines[layout.vocab], search.choices.memory, layout.recompute
    edges = sorted({*search.places(prices)} & {*prices.blocks})
    if memory is None or search.is_named or layout.parsed.stages > search.ranks or isinstance(asked, tuple):
        return
    least = LeastStep(prices, search.ranks, search.microbatches, memory, edges, search.rows)
    alike = zip(prices.levels[::5] if search.corners else (asked,))
    freely = ((prices.levels, each) for each in SLACKS if search.corners)
    for number, (policies, slack) in enumerate((*freely, *product(alike, (0.0,)))):
        if (found := least.least(policies, slack)) is None and not number:
            return  # what asks for more does not fit either
        if found is not None:
            cuts, chosen = zip(*((part.begin, part.policy) for part in found[1]), strict=True)
            yield replace(layout, edges=cuts[1:], recompute=chosen if search.corners else asked)


def _searched(search: LayoutSearch, choice: Choice, seconds: float, lean: bool) -> Choice:
    """The layout with a better order, if there may be one that is searched for; else, if it is to be `lean`, with one
    of those that hold least."""
    if _is_partial(choice) or choice.seconds <= choice.bound * ROUNDING:
        return search.lay_out(choice.layout, lean=True, order=choice) if lean and is_large(choice.layout) else choice
    return search.lay_out(choice.layout, seconds, order=choice)


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


def _is_partial(choice: Choice) -> bool:
    """Whether only the first microbatches were ordered."""
    return choice.order.microbatches < choice.layout.microbatches


def _leading(choices: Iterable[Choice]) -> list[str]:
    """The placements that are fastest with the output layer whole, if enough of them fit."""
    found = list(dict.fromkeys(each.layout.placement for each in _fastest(choices) if each.layout.vocab == "off"))
    return found[:SEARCHED] if len(found) >= SEARCHED else []
