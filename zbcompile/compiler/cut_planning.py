"""Planning: choose the cuts of the model from the user's options and the needs of the schedule.

For the shortest step, cuts that balance the ranks are moved as long as the simulated step gets shorter. The heaviest
rank is not all that counts: stages that are first to start and last to end, and ranks at their limit of memory, want
other shares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add

from zbcompile.compiler.descent import Descent, Score
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices, Policy
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import LoadRow, Spans
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.passes.partition.search import Cuts, Limits, choose_edges, describe_cuts, rank_spans
from zbcompile.passes.stage.deduplicate import Tangents
from zbcompile.program.choice import Layout
from zbcompile.schedules import Placement, Schedule, simulate
from zbcompile.schedules.execution.memory import most_waiting, peak_memory, with_messages
from zbcompile.schedules.ir.actions import flatten


def plan_cuts(
    canonical: Canonical,
    line: Line,
    schedule: Schedule,
    choices: Choices,
    edges: Sequence[int] | None = None,
    behind: Tangents | None = None,
) -> Cuts:
    """Cut `line` for `schedule`; `edges` are cuts that are
    already chosen, `behind` the gradients that arrive at the end of the line, None if it makes the loss.

    Raises PartitionError for names, or limits, that cannot be met.
    """
    placement = schedule.placement
    ranks_of = _ranks_of(placement)
    named = not isinstance(choices.balance, str)
    loads = predicted_seconds(line, choices.hardware)
    totals = [0.0, *accumulate(loads)]
    prices = LinePrices(canonical, line, choices, behind=behind)
    limits = limits_of(prices, schedule, choices)
    basis = "names" if named else "flops" if edges is None else "makespan"
    if edges is None and named:
        edges = edges_named(line, choices.balance, placement.stages)
        _require_within(line, edges, schedule, limits)
    elif edges is None:
        edges = choose_edges(line, totals, ranks_of, limits)
    cuts = describe_cuts(line, edges, totals, ranks_of, basis, "s")
    overweight = explain_overweight(line, loads, edges, ranks_of, _other_placements(placement))
    return replace(cuts, overweight=overweight)


def layout_of(schedule: Schedule, edges: Sequence[int], choices: Choices) -> Layout:
    """The layout of a named schedule with these cuts."""
    placed = str(schedule.placement), schedule.ranks, schedule.microbatches
    return Layout(*placed, tuple(edges), choices.recompute, choices.vocab)


def _other_placements(placement: Placement) -> dict[str, list[int]]:
    """Other placements by the change that leads to them, each as the rank of every stage."""
    ranks = placement.ranks
    found = {}
    if placement.kind != "v" and ranks > 1:
        found["a V schedule such as zb-v"] = _ranks_of(Placement("v", ranks, 2))
    if ranks > 2 and placement.kind != "map":
        found[f"{ranks // 2} ranks"] = _ranks_of(Placement(placement.kind, ranks // 2, placement.chunks))
    return found


def _ranks_of(placement: Placement) -> list[int]:
    return [placement.rank(stage) for stage in range(placement.stages)]


def limits_of(prices: LinePrices, schedule: Schedule, choices: Choices) -> Limits:
    """What a rank may hold; what it recomputes is not known before the cuts are, and not counted."""
    if choices.memory is None:
        return Limits()
    waiting = [most_waiting(schedule, rank) for rank in range(schedule.ranks)]

    def held(rank: int, spans: Spans) -> float:
        kept = {stage: prices.kept(begin, end) for stage, begin, end in spans}
        waits = max(sum(counts.get(stage, 0) * kept[stage] for stage in kept) for counts in waiting[rank])
        return sum(prices.footprint.resident(begin, end) for _, begin, end in spans) + waits

    return Limits(choices.memory, schedule.placement.chunks, held)


def _require_within(line: Line, edges: list[int], schedule: Schedule, limits: Limits) -> None:
    """Refuse named cuts that break the limits; they are never moved."""
    if limits.memory is None or limits.bytes_of is None:
        return
    for rank in range(schedule.ranks):
        spans = rank_spans(edges, len(line.nodes), schedule.placement.stages_of(rank))
        held = limits.bytes_of(rank, spans)
        if held > limits.memory:
            raise PartitionError(
                f"with the cuts that balance= names, rank {rank} holds {held:,.0f} bytes, more than memory="
                f"{limits.memory:.15g}."
            )


WORTH_SAYING = 1.2  # the heaviest over the mean
REMEDY = 0.05  # a remedy must lower that ratio by at least this


def explain_overweight(
    line: Line,
    loads: Sequence[float],
    edges: Sequence[int],
    ranks_of: Sequence[int],
    others: Mapping[str, Sequence[int]],
) -> str:
    """What to know if the cuts at `edges` are uneven, else "": the heaviest stage, or rank of a V, its heaviest
    operation, and remedies. `others` are placements that might be better (the rank of each stage), keyed by the change
    that gives them."""
    totals = [0.0, *accumulate(loads)]
    row = LoadRow(totals, ranks_of)
    ratio, index = _ratio(row, edges)
    if ratio < WORTH_SAYING:
        return ""
    spans = enumerate(zip([0, *edges], [*edges, len(loads)], strict=True))
    inside = [i for stage, (a, b) in spans if (ranks_of[stage] if row.folded else stage) == index for i in range(a, b)]
    heaviest = max(inside, key=loads.__getitem__)
    node = line.nodes[heaviest]
    origin = origin_of(node)
    place = f" in {origin.module}" if origin and origin.module else ""
    share = loads[heaviest] / sum(loads[i] for i in inside)
    found = {change: _ratio_elsewhere(line, totals, placement) for change, placement in others.items()}
    remedies = [
        f"{how} (then {other:.2f})" for how, other in found.items() if other is not None and other < ratio - REMEDY
    ]
    if not any(line.flops.get(later, 0) for later in line.nodes[heaviest + 1 :]):  # the last product before the loss
        remedies.append("vocab=1, which shards an output layer over all ranks (docs/vocabulary.md)")
    advice = "; ".join(remedies) or "fewer ranks or chunks, or a deeper model"
    return (
        f"{'rank' if row.folded else 'stage'} {index} carries {ratio:.2f} times the mean load, and a step is as slow "
        f"as its heaviest rank: {node.name}{place} alone is {share:.0%} of its load. To change that: {advice}."
    )


def _ratio(row: LoadRow, edges: Sequence[int]) -> tuple[float, int]:
    """The heaviest stage, or rank of a V, over the mean, and which it is."""
    loads = row.rank_loads(edges) if row.folded else row.stage_loads(edges)
    whole = sum(loads)
    return (max(loads) * len(loads) / whole if whole else 1.0), loads.index(max(loads))


def _ratio_elsewhere(line: Line, totals: Sequence[float], ranks_of: Sequence[int]) -> float | None:
    try:
        return _ratio(LoadRow(totals, ranks_of), choose_edges(line, totals, ranks_of, Limits()))[0]
    except PartitionError:
        return None


ACTIONS = 300_000  # to be simulated at most,
LONG = 2500  # more are judged by their first microbatches,
LEAST = 120  # but this many stages are tried


def layout_for_makespan(
    prices: LinePrices,
    start: Layout,
    schedule: Schedule,
    memory: float | None = None,
    levels: Sequence[Policy] = (),
    over: Callable[[], bool] = lambda: False,
) -> Layout:
    """Move cuts to where the step of `schedule` is shortest and no rank holds more than `memory` bytes, until it is
    `over`. With `levels` ranks recompute as little as that
    allows: see `keep_most`."""
    many = sum(map(len, schedule.orders)) > LONG
    step = first_microbatches(schedule, 2 * schedule.ranks) if many else schedule
    left = max(LEAST, ACTIONS // sum(map(len, step.orders)))

    def settled(layout: Layout) -> Layout:
        return layout if memory is None or not levels else keep_most(prices, layout, step, memory, levels)

    def look(layout: Layout) -> Score:
        nonlocal left
        left -= 1
        return score_of(prices, layout, step, memory)

    places = sorted({*places_of(prices.line), *start.edges})
    return Descent(places, look, lambda: left <= 0 or over(), settled=settled).run(settled(start))


def keep_most(
    prices: LinePrices,
    layout: Layout,
    schedule: Schedule,
    memory: float,
    levels: Sequence[Policy],
    rows: float = 1,
) -> Layout:
    """The layout in which each rank recomputes as little as the order of `schedule` leaves room for in `memory` bytes,
    or what holds least; `levels` are what stages may recompute, that which takes longest first."""
    placement, tried, chosen = schedule.placement, list[tuple[Policy, list[float]]](), dict[int, Policy]()
    for policy in reversed(levels):  # what ranks hold as a search of orders counts it: with the pass that needs most
        costs = with_messages(prices.costs(layout.edges, rows, policy, placement), placement)
        always = prices.held_by_any_order(placement, layout.edges, rows, policy)
        tried.append((policy, [*map(add, always, peak_memory(schedule, costs))]))
        chosen = {rank: policy for rank, held in enumerate(tried[-1][1]) if held <= memory} | chosen
        if len(chosen) == schedule.ranks:
            break
    for rank in range(schedule.ranks):
        chosen.setdefault(rank, min(tried, key=lambda each: each[1][rank])[0])
    return replace(layout, recompute=tuple(chosen[placement.rank(stage)] for stage in range(placement.stages)))


def places_of(line: Line) -> list[int]:
    """Where the line may be cut, as numbers of nodes before."""
    return [position + 1 for position, allowed in enumerate(line.allowed[:-1]) if allowed]


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The same order of fewer microbatches, which fill the pipeline, work and drain it as all do; the schedule itself
    if it has no more, or two copies of the model."""
    if schedule.microbatches <= count or schedule.placement.kind == "dual":
        return schedule
    orders = tuple(tuple(a for a in flatten(order) if a.microbatch < count) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders)


def score_of(prices: LinePrices, layout: Layout, schedule: Schedule, memory: float | None) -> Score:
    """What a layout lacks in memory on its fullest rank, and the time of its step. If `schedule` is that of its first
    microbatches, each further one takes as long as the busiest rank works on one."""
    found = prices.costs(layout.edges, recompute=layout.recompute, placement=schedule.placement)
    most = 0.0 if memory is None else max(prices.most_held(schedule, layout.edges, recompute=layout.recompute)) - memory
    timeline = simulate(schedule, found)
    more = layout.microbatches - schedule.microbatches
    return max(0.0, most), float(timeline.makespan + more * timeline.work / schedule.microbatches)
