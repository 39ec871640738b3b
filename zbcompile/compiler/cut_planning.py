"""Planning: choose the cuts of the model from the user's options and the needs of the schedule.

For the shortest step, cuts that balance the ranks are moved as long as the simulated step gets shorter. The heaviest
rank is not all that counts: stages that are first to start and last to end, and ranks at their limit of memory, want
other shares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import Row
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.memory_estimate import Footprint, Residency
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.node_costs import loads_of
from zbcompile.passes.partition.search import Cuts, Limits, choose_edges, describe_cuts, rank_spans
from zbcompile.schedules import Placement, Schedule, simulate
from zbcompile.schedules.execution.memory import most_waiting
from zbcompile.schedules.ir.actions import flatten


def plan_cuts(
    canonical: Canonical,
    line: Line,
    schedule: Schedule,
    choices: Choices,
    seconds: Mapping[str, float],
    edges: Sequence[int] | None = None,
) -> Cuts:
    """Cut `line` for `schedule`; `seconds` are the measured times for `balance="measured"`, `edges` cuts that are
    already chosen.

    Raises PartitionError for names, or limits, that cannot be met.
    """
    placement = schedule.placement
    ranks_of = _ranks_of(placement)
    named = not isinstance(choices.balance, str)
    basis = "flops" if named or choices.balance == "makespan" else str(choices.balance)
    loads, unit = loads_of(line, basis, seconds, choices.hardware)
    totals = [0.0, *accumulate(loads)]
    limits = _limits(canonical, line, schedule, choices)
    if edges is not None:
        basis = "makespan"
    elif named:
        edges = edges_named(line, choices.balance, placement.stages)
        _require_within(line, edges, schedule, limits)
    else:
        edges = choose_edges(line, totals, ranks_of, limits)
        if choices.balance == "makespan":
            basis, costs = "makespan", LineCosts(canonical, line, loads, choices.optimizer_state)
            edges = cuts_for_makespan(
                costs, edges, schedule, choices.memory, choices.boundary_bytes, choices.recompute == "full"
            )
    cuts = describe_cuts(line, edges, totals, ranks_of, "names" if named else basis, unit)
    overweight = explain_overweight(line, loads, edges, ranks_of, _other_placements(placement))
    return replace(cuts, overweight=overweight)


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


def _limits(canonical: Canonical, line: Line, schedule: Schedule, choices: Choices) -> Limits:
    if choices.memory is None:
        return Limits(choices.boundary_bytes)
    waiting = [most_waiting(schedule, rank) for rank in range(schedule.ranks)]
    residency = Residency(Footprint(canonical, line, choices.optimizer_state), waiting)
    return Limits(choices.boundary_bytes, choices.memory, schedule.placement.chunks, residency.bytes)


def _require_within(line: Line, edges: list[int], schedule: Schedule, limits: Limits) -> None:
    """Refuse named cuts that break the limits; they are never moved."""
    widest = max((line.boundary_bytes(edge - 1) for edge in edges), default=0)
    if limits.boundary is not None and widest > limits.boundary:
        raise PartitionError(
            f"a cut that balance= names carries {widest:,} bytes, more than boundary_bytes={limits.boundary:.15g}."
        )
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
    row = Row(totals, ranks_of)
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
        f"as its heaviest rank: {node.name}{place} alone is {share:.0%} of it. To change that: {advice}."
    )


def _ratio(row: Row, edges: Sequence[int]) -> tuple[float, int]:
    """The heaviest stage, or rank of a V, over the mean, and which it is."""
    loads = row.rank_loads(edges) if row.folded else row.stage_loads(edges)
    whole = sum(loads)
    return (max(loads) * len(loads) / whole if whole else 1.0), loads.index(max(loads))


def _ratio_elsewhere(line: Line, totals: Sequence[float], ranks_of: Sequence[int]) -> float | None:
    try:
        return _ratio(Row(totals, ranks_of), choose_edges(line, totals, ranks_of, Limits()))[0]
    except PartitionError:
        return None


GAIN = 1e-3  # smaller gains are not worth stages that differ, which are compiled one by one
ACTIONS = 300_000  # to be simulated at most,
LONG = 2500  # more are judged by their first microbatches,
LEAST = 120  # but so many cuts are tried
RESTARTS = 6

Score = tuple[float, float]  # bytes beyond the limit on the fullest rank, then the time of the step


def cuts_for_makespan(
    costs: LineCosts,
    edges: Sequence[int],
    schedule: Schedule,
    memory: float | None = None,
    boundary: float | None = None,
    recompute: bool = False,
) -> list[int]:
    """Move `edges` to where the step of `schedule` is shortest and no rank holds more than `memory` bytes; a cut that
    more than `boundary` bytes cross is not taken."""
    many = sum(map(len, schedule.orders)) > LONG
    places = places_of(costs.line, boundary)
    step = first_microbatches(schedule, 2 * schedule.ranks) if many else schedule

    def score(tried: Sequence[int]) -> Score:
        return score_of(costs, tried, step, memory, recompute, schedule.microbatches - step.microbatches)

    if not edges:
        return []
    left = max(LEAST, ACTIONS // sum(map(len, step.orders)))
    return _Descent(sorted({*places, *edges}), score, left).run(edges)


def places_of(line: Line, boundary: float | None = None) -> list[int]:
    """Where the line may be cut, as numbers of nodes before, and no more than `boundary` bytes cross."""
    edges = [position + 1 for position, allowed in enumerate(line.allowed[:-1]) if allowed]
    return [edge for edge in edges if boundary is None or line.boundary_bytes(edge - 1) <= boundary]


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The same order of fewer microbatches, which fill the pipeline, work and drain it as all do; the schedule itself
    if it has no more, or two copies of the model."""
    if schedule.microbatches <= count or schedule.placement.kind == "dual":
        return schedule
    orders = tuple(tuple(a for a in flatten(order) if a.microbatch < count) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders)


def score_of(
    costs: LineCosts,
    edges: Sequence[int],
    schedule: Schedule,
    memory: float | None,
    recompute: bool = False,
    more: int = 0,
) -> Score:
    """What the model cut at `edges` lacks in memory on its fullest rank, and the time of its step with so many `more`
    microbatches, for each of which the busiest rank takes as long as it works on one."""
    found = costs.costs(edges, recompute=recompute)
    most = 0.0 if memory is None else max(costs.most_held(schedule, edges, recompute=recompute)) - memory
    timeline = simulate(schedule, found)
    return max(0.0, most), float(timeline.makespan + more * timeline.work / schedule.microbatches)


class _Descent:
    """Moves cuts between `places` as long as that gains, and then from neighbours of the best cuts again."""

    def __init__(self, places: list[int], score: Callable[[Sequence[int]], Score], left: int) -> None:
        self.places, self.score, self.left = places, score, left
        self.random = Random(0)

    def run(self, edges: Sequence[int]) -> list[int]:
        best, cuts = self._down([self.places.index(edge) for edge in edges])
        for _ in range(RESTARTS):
            if self.left <= 0:
                break
            found, moved = self._down(shaken(cuts, len(self.places), self.random))
            if _is_better(found, best):
                best, cuts = found, moved
        return [self.places[cut] for cut in cuts]

    def _down(self, cuts: list[int]) -> tuple[Score, list[int]]:
        """Any move that gains, far ones first, until none does or too much was tried."""
        best, count = self._score(cuts), len(self.places)
        for step in steps_of(cuts, count):
            moves = shuffled_moves(cuts, count, step, self.random)
            while self.left > 0 and moves:
                moved = moves.pop()
                found = self._score(moved)
                if _is_better(found, best):
                    best, cuts, moves = found, moved, shuffled_moves(moved, count, step, self.random)
        return best, cuts

    def _score(self, cuts: Sequence[int]) -> Score:
        self.left -= 1
        return self.score([self.places[cut] for cut in cuts])


def shaken(cuts: Sequence[int], count: int, random: Random) -> list[int]:
    """Every cut somewhere near where it was; `cuts` are numbers of places, of which there are so many."""
    reach = max(1, count // (2 * len(cuts) + 2))
    moved = sorted({min(max(0, cut + random.randint(-reach, reach)), count - 1) for cut in cuts})
    return moved if len(moved) == len(cuts) else list(cuts)


def steps_of(cuts: Sequence[int], count: int) -> list[int]:
    """How far cuts are moved at once, in places, of which there are so many: up to as far as a stage is long."""
    return [1 << power for power in reversed(range(max(1, (count // (len(cuts) + 1)).bit_length())))]


def shuffled_moves(cuts: Sequence[int], count: int, step: int, random: Random) -> list[list[int]]:
    """Cuts that give `step` places of any stage to any other, in any order; `cuts` are numbers of places."""
    found = []
    for first, end in combinations(range(len(cuts) + 1), 2):
        for by in (step, -step):
            moved = [*cuts[:first], *(cut + by for cut in cuts[first:end]), *cuts[end:]]
            if all(a < b for a, b in pairwise([-1, *moved, count])):
                found.append(moved)
    random.shuffle(found)
    return found


def _is_better(new: Score, old: Score) -> bool:
    return new[0] < old[0] or (new[0] == old[0] and new[1] < old[1] * (1 - GAIN))
