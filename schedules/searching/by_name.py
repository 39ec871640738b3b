"""Schedules by their names, "auto" among them."""

from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.registry import build_named, find, placement_of, require_limit
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.order_search import adapted, search

AUTO_PASSES = 8  # so few that code which builds every name stays quick; `search` makes more


def build(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """Returns the schedule called `name` (any spelling) for `ranks` ranks and `microbatches`
    microbatches.

    `costs` (one entry per stage) are read by the schedules that adapt to them; `memory_limit` has
    the unit of `costs.activation`; `chunks` is the number of stages per rank, if the schedule
    leaves that open; `group` that of microbatches in a group of an interleaved schedule (default:
    equal groups of at least `ranks`); `exact=True` keeps the weight gradients of zb-h1-lazy in the
    order of microbatches. "auto" is a `search` with few passes. Raises `ScheduleError` for an
    unknown name, an unknown option, and counts that the schedule does not admit.

    >>> print(*build("1f1b", ranks=2, microbatches=2).orders[1])
    F1.0 BW1.0 F1.1 BW1.1
    """
    family = find(name)
    require_limit(memory_limit)
    if unknown := sorted(set(options) - set(family.options)):
        expected = f"expected {', '.join(family.options)}" if family.options else "it has none"
        raise ScheduleError(f"{family.name}: unknown option {', '.join(unknown)}; {expected}")
    if family.generate is not None:
        schedule = build_named(family, ranks, microbatches, costs, memory_limit, chunks, **options)
        return schedule if costs is None else adapted(schedule, costs)
    if chunks is None and costs is not None and ranks >= 1 and costs.stages % ranks == 0:
        chunks = costs.stages // ranks
    placement = placement_of(family, ranks, chunks, costs)
    costs = costs or Costs.uniform(placement.stages)
    chunks = placement.chunks
    kinds = ["linear" if chunks == 1 else f"looped:{chunks}", *["v"] * (chunks == 2)]
    return search(costs, ranks, microbatches, memory_limit, kinds, passes=AUTO_PASSES).schedule
