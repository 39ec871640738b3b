"""Choosing the cuts of a model: even shares of the FLOPs of its operations, or the names in `balance=`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import LoadRow
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.passes.partition.search import Cuts, choose_edges, describe_cuts
from zbcompile.schedules import Placement, Schedule


def plan_cuts(line: Line, schedule: Schedule, choices: Choices) -> Cuts:
    """Returns the cuts of `line` into the stages of `schedule`. Raises PartitionError for names that cannot be met, and
    for a model with too few places to cut."""
    placement = schedule.placement
    ranks_of = _ranks_of(placement)
    loads = predicted_seconds(line, choices.hardware)
    totals = [0.0, *accumulate(loads)]
    if isinstance(choices.balance, str):
        edges, basis = choose_edges(line, totals, ranks_of), "flops"
    else:
        edges, basis = edges_named(line, choices.balance, placement.stages), "names"
    cuts = describe_cuts(line, edges, totals, ranks_of, basis, "s")
    overweight = explain_overweight(line, loads, edges, ranks_of, _other_placements(placement))
    return replace(cuts, overweight=overweight)


def _other_placements(placement: Placement) -> dict[str, list[int]]:
    """Other placements by the change that leads to them, each as the rank of every stage."""
    ranks = placement.ranks
    found = {}
    if placement.kind != "v" and ranks > 1:
        found["a V schedule such as zb-v"] = _ranks_of(Placement.named("v", ranks, 2))
    if ranks > 2 and placement.kind != "map":
        found[f"{ranks // 2} ranks"] = _ranks_of(Placement.named(placement.kind, ranks // 2, placement.chunks))
    return found


def _ranks_of(placement: Placement) -> list[int]:
    return [placement.rank(stage) for stage in range(placement.stages)]


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
        return _ratio(LoadRow(totals, ranks_of), choose_edges(line, totals, ranks_of))[0]
    except PartitionError:
        return None
