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
from zbcompile.schedules.ir.actions import COLLECTIVES, RECEIVES, SENDS, B, Step
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule


def run_to_end(schedule: Schedule, costs: Costs) -> tuple[OrderGraph, NodeTimes]:
    """Returns the graph of the orders and the times of its nodes.

    Raises `ScheduleError` with the cycle of waits, or the action that is missing, if a rank does
    not finish.
    """
    graph = OrderGraph(schedule)
    require_stages(schedule, costs)
    times = run(graph, graph.times(costs), graph.delays(costs))
    if times.stuck:
        raise deadlock_error(graph, times)
    return graph, times


def deadlock_error(graph: OrderGraph, times: NodeTimes) -> ScheduleError:
    """Returns the error that shows why ranks are stuck."""
    schedule, lines, visited = graph.schedule, list[str](), list[int]()
    rank = min(times.stuck)
    while rank in times.stuck and rank not in visited:
        visited.append(rank)
        node = times.stuck[rank]
        needed = next(
            a
            for a, producer in graph.needed_by(node)
            if producer == MISSING or times.end[producer] is None
        )
        rank = schedule.rank_of(needed.stage, needed.microbatch)
        verb = (
            "post"
            if needed.op in RECEIVES | COLLECTIVES
            else "reach"
            if needed.op in SENDS
            else "run"
        )
        action = (
            f"B or BW of stage {needed.stage}, microbatch {needed.microbatch}"
            if needed.op == B
            else needed
        )
        lines.append(
            f"  rank {visited[-1]} stops at {graph.steps[node]} and waits for rank {rank} to {verb}"
            f" {action}"
        )
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
    first, last = max(0, index - COLUMNS), index + COLUMNS + 1
    ranks = range(max(0, rank - ROWS), min(len(orders), rank + ROWS + 1))
    table = [["", *map(str, range(first, min(last, max(len(orders[r]) for r in ranks))))]]
    for r in ranks:
        cells = [
            f"[{s}]" if (r, i) == (rank, index) else str(s)
            for i, s in enumerate(orders[r][first:last], first)
        ]
        table.append([f"rank {r}", *cells])
    widths = [max(len(row[c]) for row in table if c < len(row)) for c in range(len(table[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        for row in table
    )
    return ScheduleError("\n".join([message, *map(str.rstrip, lines)]))
