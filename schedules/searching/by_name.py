"""Schedules by their names, "auto" among them."""

from dataclasses import replace
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.generators.registry import admitted_task, find, require_limit, require_within
from zbcompile.schedules.generators.task import Task
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.order_search import search
from zbcompile.schedules.searching.starting_orders import named_schedule

AUTO_MOVES = 400  # so few that code which builds every name stays quick; `search` takes as many as one likes
AUTO_SECONDS = 600


def build(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """Generate the schedule called `name` (any spelling) for `ranks` ranks and `microbatches` microbatches.

    `costs` (one entry per stage) are read by the schedules that adapt to them; `memory_limit` has the unit of
    `costs.activation`; `chunks` is the number of stages per rank, if the schedule leaves that open; `group` that of
    microbatches in a group of an interleaved schedule (default: equal groups of at least `ranks`). "auto" is
    `search` with a fixed number of moves. Raises `ScheduleError` for an unknown name, an unknown option, and counts
    that the schedule does not admit.

    >>> print(*build("1f1b", ranks=2, microbatches=2).orders[1])
    F1.0 BW1.0 F1.1 BW1.1
    """
    family = find(name)
    require_limit(memory_limit)
    if family.generate is None and chunks is None and costs is not None and ranks >= 1:
        chunks = costs.stages // ranks if costs.stages % ranks == 0 else None
    task = replace(admitted_task(family, ranks, microbatches, chunks, options, costs), memory_limit=memory_limit)
    if family.generate is None:
        return _searched(task, **options)
    schedule = named_schedule(family, task, options)
    require_within(schedule, task)
    return schedule


def _searched(task: Task, objective: str = "makespan", moves: int = AUTO_MOVES) -> Schedule:
    if objective not in ("cost", "makespan"):
        raise ScheduleError(f'objective={objective!r}; expected "cost" or "makespan"')
    kinds = {1: ("linear",), 2: ("looped:2", "v")}.get(task.chunks, (f"looped:{task.chunks}",))
    asked = task.costs_or_equal, task.ranks, task.microbatches, task.memory_limit, kinds, objective == "makespan"
    return search(*asked, AUTO_SECONDS, moves).schedule
