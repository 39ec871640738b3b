"""Schedules as files: CSV that torch's own loader reads, and JSON with its placement.

torch (distributed/pipelining/schedules.py, `_load_csv`, 2.11 to 2.15) expects one row per rank and
one action per cell; it reads schedules as format "compute_only" and lowered programs as
"compute_comms". It knows no second model copy.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import Step, flatten
from zbcompile.schedules.ir.placement import Placement, require_count
from zbcompile.schedules.ir.schedule import (
    Orders,
    Schedule,
    compute_only,
    format_step,
    parse_step,
    require_schedule,
)
from zbcompile.untrusted_text import parse_json, read_text

# Actions of torch between those of a schedule.
TORCH_ONLY = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB])\d*")
ENDS_OF_SCHEDULES = (".csv", ".json")
JSON_VERSION = 2


def to_csv(schedule: Schedule) -> str:
    """Returns one row per rank, one action in torch's letters per cell.

    >>> from zbcompile.schedules import build
    >>> print(to_csv(build("1f1b", ranks=2, microbatches=2)))
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    <BLANKLINE>
    """
    require_schedule(schedule)
    if schedule.placement.copies > 1:
        hint = "torch supports one copy of a stage; use dualpipe-v, or write .json"
        raise ScheduleError(f"{schedule.name}: {hint}")
    if schedule.barriers != 1 or schedule.lookups:
        what = "lookups" if schedule.lookups else f"its {schedule.barriers} barriers"
        raise ScheduleError(f"{schedule.name}: a CSV cannot hold {what}; write .json")
    rows = (",".join(format_step(step, "torch") for step in order) for order in schedule.orders)
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Returns the schedule that `to_csv` or torch's `_dump_csv` wrote.

    Empty cells (torch's bubbles), SEND and RECV, and torch's UNSHARD, RESHARD, REDUCE_GRAD and
    waits are left out: `lower` places messages again. The placement is read off the rows.
    """
    rows = [row.split(",") for row in text.splitlines() if row]
    orders = compute_only(_parse_cells(rank, row) for rank, row in enumerate(rows))
    actions = [action for order in orders for action in flatten(order)]
    if not actions:
        raise ScheduleError("this CSV holds no actions; expected one row of actions per rank")
    placement = infer_placement(orders)
    microbatches = 1 + max(action.microbatch for action in actions)
    _require_counts(placement, microbatches, orders)
    return Schedule(name, placement, microbatches, orders)


def _parse_cells(rank: int, row: Sequence[str]) -> Iterator[Step]:
    for column, cell in enumerate(map(str.strip, row)):
        if cell and not TORCH_ONLY.fullmatch(cell):
            try:
                yield parse_step(cell)
            except ScheduleError as error:
                raise ScheduleError(f"CSV row {rank + 1}, cell {column + 1}: {error}") from None


def infer_placement(orders: Sequence[Sequence[Step]]) -> Placement:
    """Returns the placement under which every rank runs its own stages and no others.

    >>> from zbcompile.schedules.ir.schedule import parse_order
    >>> str(infer_placement([parse_order("F0.0 F3.0"), parse_order("F1.0 F2.0")]))
    'v'
    """
    stages = [sorted({action.stage for action in flatten(order)}) for order in orders]
    owners = {stage: rank for rank, of_rank in enumerate(stages) for stage in of_rank}
    count = sum(map(len, stages))
    if all(stages) and {*owners} == {*range(count)}:
        return Placement.of_ranks(owners[stage] for stage in range(count))
    listing = "; ".join(
        f"rank {rank}: {', '.join(map(str, of_rank)) or 'none'}"
        for rank, of_rank in enumerate(stages)
    )
    expected = "each of the stages 0 to n-1 on one rank, at least one on every rank"
    raise ScheduleError(f"stages by rank ({listing:.400}) match no placement; expected {expected}")


def _require_counts(placement: Placement, microbatches: int, orders: Orders) -> None:
    """Raises `ScheduleError` for counts that the orders cannot have, before memory is allocated for
    them."""
    require_count("microbatches", microbatches)
    actions = len(orders) + 2 * sum(map(len, orders))
    if placement.ranks != len(orders) or max(placement.stages, microbatches) > actions:
        counts = f"{placement.ranks} ranks, {placement.stages} stages, {microbatches} microbatches"
        raise ScheduleError(f"{counts}, but orders of {len(orders)} ranks with {actions} actions")


def to_json(schedule: Schedule) -> str:
    """Returns a schedule as JSON, one line per rank."""
    require_schedule(schedule)
    data: dict[str, Any] = {
        "format": "zbcompile schedule",
        "version": JSON_VERSION,
        "name": schedule.name,
        "placement": str(schedule.placement),
        "microbatches": schedule.microbatches,
        "barriers": schedule.barriers,
        "lookups": schedule.lookups,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    rows = ",\n".join(json.dumps([str(step) for step in order]) for order in schedule.orders)
    return "{\n" + ",\n".join([*lines, f'"orders": [\n{rows}]']) + "\n}\n"


def from_json(text: str) -> Schedule:
    """Returns what `to_json` wrote; raises `ScheduleError` for anything else."""
    return from_dict(parse_json(text, ScheduleError))


def from_dict(data: Any) -> Schedule:
    """Returns the schedule in the value of a JSON text."""
    try:
        if data["version"] != JSON_VERSION:
            raise ScheduleError(
                f"JSON version {data['version']!r:.80}; this release reads version {JSON_VERSION}"
            )
        orders = tuple(tuple(map(parse_step, row)) for row in data["orders"])
        placement = Placement.parse(data["placement"], len(orders))
        name, microbatches, barriers, lookups = (
            data[k] for k in ("name", "microbatches", "barriers", "lookups")
        )
        _require_counts(placement, microbatches, orders)
        if type(name) is not str or barriers not in (1, 2) or type(lookups) is not bool:
            raise ScheduleError(
                f"a schedule called {name!r:.80} with barriers={barriers!r:.80},"
                f" lookups={lookups!r:.80}"
            )
        return Schedule(name, placement, microbatches, orders, barriers, lookups)
    except (KeyError, TypeError, AttributeError) as error:
        raise ScheduleError(
            f"JSON that describes no schedule: {error!r:.200}; write it with `to_json`"
        ) from None


def save(schedule: Schedule, path: str | Path) -> None:
    """Writes a file by its ending: .csv (torch's letters) or .json."""
    text = to_csv(schedule) if _ending(path) == ".csv" else to_json(schedule)
    Path(path).write_text(text, encoding="utf-8")


def load(path: str | Path) -> Schedule:
    """Returns the schedule in a file, by its ending: .csv (named after the file) or .json."""
    ending, text = _ending(path), read_text(path, ScheduleError)
    return from_json(text) if ending == ".json" else from_csv(text, name=Path(path).stem)


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix
    if ending not in ENDS_OF_SCHEDULES:
        raise ScheduleError(f"{path}: ending {ending!r}; expected .csv or .json")
    return ending
