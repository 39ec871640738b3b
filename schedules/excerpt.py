"""The grid around a culprit, for error messages."""

from collections.abc import Sequence

from zbcompile.schedules.actions import Step
from zbcompile.schedules.errors import ScheduleError

COLUMNS, ROWS = 4, 2  # shown on either side of the culprit


def excerpt(orders: Sequence[Sequence[Step]], rank: int, index: int) -> str:
    """The steps around step `index` of `rank`, and what its neighbours do at the same place; the culprit in brackets.

    >>> from zbcompile.schedules.actions import Action
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
