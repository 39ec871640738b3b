"""Planning: choose the cuts of the model from the user's options and the needs of the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.compiler.makespan_cuts import cuts_for_makespan
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
from zbcompile.schedules import Placement, Schedule
from zbcompile.schedules.execution.memory import most_waiting


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
GAIN = 0.05  # a remedy must lower that ratio by at least this


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
        f"{how} (then {other:.2f})" for how, other in found.items() if other is not None and other < ratio - GAIN
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
