"""Runs an order to its end, or names the ranks that wait for each other."""

from collections.abc import Sequence

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.order_graph import MISSING, NodeTimes, OrderGraph, require_stages, run
from zbcompile.schedules.ir.actions import COLLECTIVES, RECEIVES, SENDS, Action, B, Step
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule


def run_to_end(schedule: Schedule, costs: Costs) -> tuple[OrderGraph, NodeTimes]:
    """Returns the graph of the orders and the times of its nodes.

    Raises `ScheduleError` with the cycle of waits, or the action that is missing, if a rank does not finish.
    """
    graph = OrderGraph(schedule)
    require_stages(schedule, costs)
    found = run(graph, graph.times(costs), graph.delays(costs))
    if found.stuck:
        raise deadlock_error(graph, found)
    return graph, found


def deadlock_error(graph: OrderGraph, found: NodeTimes) -> ScheduleError:
    """Returns the error that shows why ranks are stuck."""
    schedule, orders = graph.schedule, graph.schedule.orders
    lines, seen = [], list[int]()
    rank = min(found.stuck)
    while rank in found.stuck and rank not in seen:
        seen.append(rank)
        node = found.stuck[rank]
        wanted = next(a for a, made in graph.needed_by(node) if made == MISSING or found.end[made] is None)
        owner = schedule.rank_of(wanted.stage, wanted.microbatch)
        lines.append(f"  rank {rank} stops at {graph.steps[node]} and waits for rank {owner} to {_deed(wanted)}")
        rank = owner
    index = found.stuck[seen[-1]] - graph.first[seen[-1]]
    if rank == seen[-1]:
        step = orders[rank][index]
        what = f"rank {rank} runs {step} before an action on the same rank that it depends on"
    elif rank in seen:
        what = "deadlock: these ranks wait for each other"
    else:
        what = f"the orders do not finish: rank {rank} has ended and never runs what another rank waits for"
    return ScheduleError("\n".join([f"{schedule.name}: {what}", *lines, excerpt(orders, seen[-1], index)]))


def _deed(action: Action) -> str:
    if action.op in RECEIVES | COLLECTIVES:
        return f"post {action}"
    if action.op in SENDS:
        return f"reach {action}"
    return f"run {action}" if action.op != B else f"run B or BW of stage {action.stage}, microbatch {action.microbatch}"


COLUMNS, ROWS = 4, 2  # shown on either side of the culprit


def excerpt(orders: Sequence[Sequence[Step]], rank: int, index: int) -> str:
    """Returns the steps around step `index` of `rank`, and those of its neighbours; the culprit is in brackets.

    >>> from zbcompile.schedules.ir.actions import Action
    >>> print(excerpt([(Action("F", 0, 0), Action("F", 0, 1))], 0, 1))
            0     1
    rank 0  F0.0  [F0.1]
    """
    first, last = max(0, index - COLUMNS), index + COLUMNS + 1
    ranks = range(max(0, rank - ROWS), min(len(orders), rank + ROWS + 1))
    table = [["", *map(str, range(first, min(last, max(len(orders[r]) for r in ranks))))]]
    for r in ranks:
        cells = [f"[{s}]" if (r, i) == (rank, index) else str(s) for i, s in enumerate(orders[r][first:last], first)]
        table.append([f"rank {r}", *cells])
    widths = [max(len(row[c]) for row in table if c < len(row)) for c in range(len(table[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def schedule_error_at(message: str, orders: Sequence[Sequence[Step]], rank: int, index: int) -> ScheduleError:
    """Returns a `ScheduleError` with the grid around step `index` of `rank`."""
    return ScheduleError(f"{message}\n{excerpt(orders, rank, index)}")
