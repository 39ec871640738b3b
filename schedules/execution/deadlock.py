"""Runs an order to its end, or names the ranks that wait for each other."""

from collections.abc import Sequence

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.order_graph import (
    MISSING,
    NodeTimes,
    OrderGraph,
    require_stages,
    run,
)
from zbcompile.schedules.ir.actions import COMMUNICATION, SENDS, B, Step
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule


def run_to_end(
    schedule: Schedule, costs: Costs, positive: bool = False
) -> tuple[OrderGraph, NodeTimes]:
    """Returns the graph of the orders and the times of its nodes.

    With `positive`, steps that take no time take a very short one. Raises `ScheduleError` with the
    cycle of waits, or the action that is missing, if a rank does not finish.
    """
    graph = OrderGraph(schedule)
    require_stages(schedule, costs)
    times = graph.times(costs)
    if positive:
        shortest = min((time for time in times if time > 0), default=1) / 1024
        last = graph.first[-1]  # barriers take no time
        times = [time or shortest for time in times[:last]] + times[last:]
    run_times = run(graph, times, graph.delays(costs))
    if run_times.stuck:
        raise deadlock_error(graph, run_times)
    return graph, run_times


def deadlock_error(graph: OrderGraph, times: NodeTimes) -> ScheduleError:
    """Returns the error that shows why ranks are stuck."""
    schedule, lines, visited = graph.schedule, list[str](), list[int]()
    rank = min(times.stuck)
    while rank in times.stuck and rank not in visited:
        visited.append(rank)
        node = times.stuck[rank]
        needed = next(
            action
            for action, producer in graph.needed_by(node)
            if producer == MISSING or times.end[producer] is None
        )
        rank = schedule.rank_of(needed.stage, needed.microbatch)
        verb = "reach" if needed.op in SENDS else "post" if needed.op in COMMUNICATION else "run"
        stage = f"stage {needed.stage}, microbatch {needed.microbatch}"
        text = f"B or BW of {stage}" if needed.op == B else needed
        stop = f"  rank {visited[-1]} stops at {graph.steps[node]}"
        lines.append(f"{stop} and waits for rank {rank} to {verb} {text}")
    if rank == visited[-1]:
        what = f"rank {rank} runs {graph.steps[node]} before {needed}, on which it depends"
    elif rank in visited:
        what = "deadlock: these ranks wait for each other"
    else:
        what = (
            f"the orders do not finish: rank {rank} has ended and never runs what another rank"
            " waits for"
        )
    message = "\n".join([f"{schedule.name}: {what}", *lines])
    return schedule_error_at(message, schedule.orders, visited[-1], node - graph.first[visited[-1]])


COLUMNS, ROWS = 4, 2  # shown on either side of the culprit


def schedule_error_at(
    message: str, orders: Sequence[Sequence[Step]], rank: int, index: int
) -> ScheduleError:
    """Returns a `ScheduleError` with the steps around step `index` of `rank`, which is in brackets.

    >>> from zbcompile.schedules.ir.actions import Action
    >>> print(schedule_error_at("too late", [(Action("F", 0, 0), Action("F", 0, 1))], 0, 1))
    too late
            0     1
    rank 0  F0.0  [F0.1]
    """
    columns = slice(max(0, index - COLUMNS), index + COLUMNS + 1)
    rows = []
    for r, order in [*enumerate(orders)][max(0, rank - ROWS) : rank + ROWS + 1]:
        cells = [f"[{s}]" if (r, i) == (rank, index) else str(s) for i, s in enumerate(order)]
        rows.append([f"rank {r}", *cells[columns]])
    numbers = range(columns.start, columns.start + max(map(len, rows)) - 1)
    from tabulate import tabulate  # only for errors: a schedule needs no other package

    grid = tabulate(rows, ["", *numbers], "plain", disable_numparse=True)
    return ScheduleError("\n".join([message, *map(str.rstrip, grid.splitlines())]))
