"""Planning: choose the cuts of the model from the user's options and the needs of the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zbcompile.compiler.line_costs import LineCosts
from zbcompile.compiler.makespan_cuts import cuts_for_makespan
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.partition.imbalance import find_overweight
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.memory_estimate import Footprint, Residency
from zbcompile.passes.partition.named_cuts import edges_named
from zbcompile.passes.partition.node_costs import loads_of
from zbcompile.passes.partition.search import Cuts, Limits, choose_edges, describe_cuts, rank_spans
from zbcompile.schedules.execution.memory import most_waiting
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule


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
    loads, unit = loads_of(line, basis, seconds)
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
    overweight = find_overweight(line, loads, edges, ranks_of, _other_placements(placement))
    return replace(cuts, overweight=str(overweight)) if overweight else cuts


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
            f"a cut that balance= names carries {widest} bytes, more than boundary_bytes={limits.boundary:g}."
        )
    if limits.memory is None or limits.bytes_of is None:
        return
    for rank in range(schedule.ranks):
        spans = rank_spans(edges, len(line.nodes), schedule.placement.stages_of(rank))
        held = limits.bytes_of(rank, spans)
        if held > limits.memory:
            raise PartitionError(
                f"with the cuts that balance= names, rank {rank} holds {held:.4g} bytes, more than memory="
                f"{limits.memory:g}."
            )
