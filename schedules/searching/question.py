"""From the arguments of a search to its problems: one for every placement that the costs and the ranks allow."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.registry import require_limit
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement, require_count
from zbcompile.schedules.searching.problem import ROUNDING, Problem
from zbcompile.schedules.searching.starting_orders import one_by_one

USUAL = ("linear", "looped:2", "v", "looped:4")  # of costs that are a function, which allow any number of stages


def problems_of(
    costs: Costs | Callable[[int], Costs],
    ranks: int,
    microbatches: int,
    memory_limit: float | Sequence[float] | None,
    placements: Sequence[str | Placement] | None,
    barrier: bool,
    barriers: int,
) -> list[Problem]:
    """One problem for each placement whose memory suffices at all; raises `ScheduleError` if there is none."""
    require_count("ranks", ranks)
    require_count("microbatches", microbatches)
    limits = _limits(memory_limit, ranks)
    every = [
        Problem(placement, microbatches, cut, limits, barrier, barriers)
        for placement, cut in _cuts(costs, ranks, placements)
    ]
    for problem in every:
        if not problem.finite:
            added_up = f"placement {problem.placement}: the times, or the bytes, of all passes add up"
            raise ScheduleError(f"{added_up} to more than a float can be; give costs in a larger unit")
    fitting = [problem for problem in every if problem.fits(one_by_one(problem))]
    if not fitting:
        raise ScheduleError("\n  ".join(("memory_limit: no order fits", *map(_shortage, every))))
    return fitting


def _limits(limit: float | Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    if limit is None:
        return None
    several = isinstance(limit, Iterable) and not isinstance(limit, str)
    limits: tuple[Any, ...] = tuple(limit) if several else (limit,) * ranks  # type: ignore[arg-type]
    for each in limits:
        require_limit(each)
    if len(limits) != ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} entries for {ranks} ranks; give one number or one a rank")
    return limits


def _cuts(
    costs: Costs | Callable[[int], Costs], ranks: int, placements: Sequence[str | Placement] | None
) -> Iterator[tuple[Placement, Costs]]:
    """The placements, each with the costs of its stages."""
    if isinstance(placements, str):
        raise ScheduleError(f"placements={placements!r:.80}; expected a list, such as [{placements!r:.80}]")
    asked = placements if placements is not None else _possible(costs, ranks)
    if not asked:
        raise ScheduleError("placements is empty; name some, such as linear and v, or leave it out")
    for each in asked:
        placement = Placement.parse(each, ranks) if isinstance(each, str) else each
        if placement.ranks != ranks:
            raise ScheduleError(f"placement {placement} is for {placement.ranks} ranks, but there are {ranks}")
        if isinstance(costs, Costs) and costs.stages % placement.stages:
            has, wanted = f"costs of {costs.stages} stages", placement.stages
            merged = f"cannot be merged into the {wanted} stages of placement {each}"
            raise ScheduleError(f"{has} {merged}; give costs for a multiple of {wanted} stages")
        cut = costs.resized if isinstance(costs, Costs) else costs
        yield placement, cut(placement.stages)


def _possible(costs: Costs | Callable[[int], Costs], ranks: int) -> tuple[str, ...]:
    """All placements with one copy of the model that the costs can be merged for."""
    if not isinstance(costs, Costs):
        return USUAL
    chunks, left = divmod(costs.stages, ranks)
    if left or not chunks:
        raise ScheduleError(f"costs of {costs.stages} stages for {ranks} ranks; give a multiple of {ranks} stages")
    counts = [v for v in range(1, chunks + 1) if chunks % v == 0]
    found = ["linear" if v == 1 else f"looped:{v}" for v in counts]
    return (*found, *(["v"] if 2 in counts else []))


def _shortage(problem: Problem) -> str:
    """Which rank has too little for even one microbatch at a time, and how much."""
    needs = [*map(float, peak_memory(problem.schedule(one_by_one(problem)), problem.costs))]
    limits = [*map(float, problem.limits or ())]
    rank = max(range(len(limits)), key=lambda r: needs[r] - limits[r] * ROUNDING)
    unit = f" {problem.costs.memory_unit}" if problem.costs.memory_unit else ""
    more = f"{needs[rank] - limits[rank]:,.6g}{unit} more than its limit of {limits[rank]:,.6g}{unit}"
    return f"placement {problem.placement}: rank {rank} needs {needs[rank]:,.6g}{unit} for one microbatch, {more}"
