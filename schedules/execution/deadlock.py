"""Names the ranks that wait for each other when a run does not finish."""

from collections.abc import Sequence

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.event_loop import Outcome
from zbcompile.schedules.ir.actions import COLLECTIVES, EXCHANGES, RECEIVES, SENDS, Action, B, Step
from zbcompile.schedules.ir.schedule import Lowered, Schedule, parts


def require_finished(program: Schedule | Lowered, outcome: Outcome) -> None:
    """Raise `ScheduleError` with the circle of waits, or the action that is missing, unless every rank has finished."""
    if not outcome.blocked:
        return
    schedule, orders = parts(program)
    lines, seen = [], []
    rank = min(outcome.blocked)
    while rank in outcome.blocked and rank not in seen:
        seen.append(rank)
        step = orders[rank][len(outcome.end[rank])]
        wanted = outcome.events.action(outcome.blocked[rank])
        there = wanted.op in EXCHANGES  # they are named by their rank
        owner = wanted.stage if there else schedule.rank_of(wanted.stage, wanted.microbatch)
        lines.append(f"  rank {rank} stops at {step} and waits for rank {owner} to {_deed(wanted)}")
        rank = owner
    if rank == seen[-1]:
        step = orders[rank][len(outcome.end[rank])]
        what = f"rank {rank} runs {step} before an action on the same rank that it depends on"
    elif rank in seen:
        what = "deadlock: these ranks wait for each other"
    else:
        what = f"the orders do not finish: rank {rank} has ended and never runs what another rank waits for"
    grid = excerpt(orders, seen[-1], len(outcome.end[seen[-1]]))
    raise ScheduleError("\n".join([f"{schedule.name}: {what}", *lines, grid]))


def _deed(action: Action) -> str:
    if action.op in RECEIVES | COLLECTIVES:
        return f"post {action}"
    if action.op in SENDS or action.op in EXCHANGES:
        return f"reach {action}"
    return f"run {action}" if action.op != B else f"run B or BW of stage {action.stage}, microbatch {action.microbatch}"


COLUMNS, ROWS = 4, 2  # shown on either side of the culprit


def excerpt(orders: Sequence[Sequence[Step]], rank: int, index: int) -> str:
    """The steps around step `index` of `rank`, and what its neighbours do at the same place; the culprit in brackets.

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


def culprit_error(message: str, orders: Sequence[Sequence[Step]], rank: int, index: int) -> ScheduleError:
    """A `ScheduleError` with the grid around step `index` of `rank`."""
    return ScheduleError(f"{message}\n{excerpt(orders, rank, index)}")
