"""Schedules as files: CSV that torch's own loader reads, and JSON with placement and costs.

torch (distributed/pipelining/schedules.py, `_load_csv`, 2.11 to 2.15) expects one row per rank and one action per cell;
it reads schedules as format "compute_only" and lowered programs as "compute_comms". It knows no second model copy.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import SENDS, Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import (
    Letters,
    Schedule,
    compute_only,
    format_step,
    parse_step,
    require_counts,
    require_schedule,
)
from zbcompile.untrusted_text import parse_json, read_text

TORCHS_OWN = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB])\d*")  # written among the others
ENDS_OF_SCHEDULES = (".csv", ".json")
JSON_VERSION = 1
PASSES = [(barriers, lookups) for barriers in (1, 2) for lookups in (False, True)]
RANKS = 1 << 16  # no CSV has more rows
SHOWN = 16  # ranks, and stages of each, in a message


def to_csv(schedule: Schedule, letters: Letters = "torch", waits: bool = False) -> str:
    """Returns one row per rank, one action per cell.

    `waits`: with the WAIT_SEND_F and WAIT_SEND_B that torch 2.15 expects among messages and earlier releases do not
    know: each before the rank's next send.

    >>> from zbcompile.schedules import build
    >>> print(to_csv(build("1f1b", ranks=2, microbatches=2)))
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    <BLANKLINE>
    """
    require_schedule(schedule)
    if letters == "torch" and schedule.placement.kind == "dual":
        raise ScheduleError(f"{schedule.name}: torch supports one copy of a stage; use dualpipe-v, or letters='papers'")
    if schedule.barriers != 1 or schedule.lookups:
        what = "lookups" if schedule.lookups else f"its {schedule.barriers} barriers"
        raise ScheduleError(f"{schedule.name}: a CSV cannot hold {what}; write .json")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow(_with_waits(order) if waits else [format_step(step, letters) for step in order])
    return out.getvalue()


def _with_waits(order: Sequence[Step]) -> list[str]:
    found: list[str] = []
    waiting = ""
    for step in order:
        cell = format_step(step, "torch")
        if step[0] in SENDS:
            found += [waiting] * bool(waiting)
            waiting = cell.replace("SEND", "WAIT_SEND")
        found.append(cell)
    return found + [waiting] * bool(waiting)


def from_csv(text: str, name: str = "csv", placement: Placement | None = None) -> Schedule:
    """Reads what `to_csv` or torch's `_dump_csv` writes.

    Empty cells (torch's bubbles), SEND and RECV, and torch's UNSHARD, RESHARD, REDUCE_GRAD and waits are left out:
    `lower` places messages anew. The placement is read off the rows unless it is given.
    """
    try:
        rows = list(islice(filter(None, csv.reader(io.StringIO(text))), RANKS + 1))
    except csv.Error as error:
        raise ScheduleError(f"invalid CSV: {error}") from None
    if len(rows) > RANKS:
        raise ScheduleError(f"this CSV has more than {RANKS} rows; expected one row of actions per rank")
    orders = compute_only(_cells(rank, row) for rank, row in enumerate(rows))
    actions = [action for order in orders for action in flatten(order)]
    if not actions:
        raise ScheduleError("this CSV holds no actions; expected one row of actions per rank")
    microbatches = 1 + max(action.microbatch for action in actions)
    found = placement or infer_placement(orders)
    require_counts(found, microbatches, orders)
    return Schedule(name, found, microbatches, orders)


def _cells(rank: int, row: Sequence[str]) -> list[Step]:
    steps = []
    for column, cell in enumerate(row):
        if not cell.strip() or TORCHS_OWN.fullmatch(cell.strip()):
            continue
        try:
            steps.append(parse_step(cell.strip()))
        except ScheduleError as error:
            raise ScheduleError(f"CSV row {rank + 1}, cell {column + 1}: {error}") from None
    return steps


def infer_placement(orders: Sequence[Sequence[Step]]) -> Placement:
    """The placement under which every rank runs its own stages and no others.

    >>> from zbcompile.schedules.ir.schedule import parse_order
    >>> infer_placement([parse_order("F0.0 F3.0"), parse_order("F1.0 F2.0")])
    Placement(kind='v', ranks=2, chunks=2, owners=())
    """
    found = [tuple(sorted({action.stage for action in flatten(order)})) for order in orders]
    dual = Placement("dual", len(orders))
    if len(orders) > 1 and [dual.stages_of(rank) for rank in range(dual.ranks)] == found:
        return dual
    owners = {stage: rank for rank, owned in enumerate(found) for stage in owned}
    if all(found) and sorted(owners) == sorted(stage for owned in found for stage in owned) == [*range(len(owners))]:
        return Placement.of_owners([owners[stage] for stage in range(len(owners))])
    listing = "; ".join(f"rank {rank}: {_listed(owned)}" for rank, owned in enumerate(found[:SHOWN]))
    listing += "; ..." * (len(found) > SHOWN)
    expected = "each of the stages 0 to n-1 on one rank, at least one on every rank (or two copies of the model, dual)"
    raise ScheduleError(f"stages by rank ({listing}) match no placement; expected {expected}")


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages[:SHOWN])) + ", ..." * (len(stages) > SHOWN) or "none"


class Document(NamedTuple):
    """What a JSON file holds."""

    schedule: Schedule
    costs: Costs | None


def to_json(schedule: Schedule, costs: Costs | None = None) -> str:
    """Returns a schedule, with `costs` if given, as JSON, one line per rank."""
    require_schedule(schedule)
    data: dict[str, Any] = {
        "format": "zbcompile schedule",
        "version": JSON_VERSION,
        "name": schedule.name,
        "placement": {name: value for name, value in asdict(schedule.placement).items() if value != ()},
        "microbatches": schedule.microbatches,
    }
    if schedule.barriers != 1:
        data["barriers"] = schedule.barriers
    if schedule.lookups:
        data["lookups"] = True
    if costs is not None:
        data["costs"] = json.loads(costs.to_json())
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    lines.append(f'"orders": {_rows(schedule.orders)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(orders: Sequence[Sequence[Step]]) -> str:
    return "[\n" + ",\n".join(json.dumps([str(step) for step in order]) for order in orders) + "]"


def from_json(text: str) -> Document:
    """Read what `to_json` writes; raises `ScheduleError` for anything else."""
    return from_dict(parse_json(text, ScheduleError))


def from_dict(data: Any) -> Document:
    """As `from_json`, from the value of the text."""
    try:
        if data["version"] != JSON_VERSION:
            raise ScheduleError(f"JSON version {data['version']!r:.80}; this release reads version {JSON_VERSION}")
        orders = _orders(data["orders"])
        placement, passes = Placement(**data["placement"]), (data.get("barriers", 1), data.get("lookups", False))
        require_counts(placement, data["microbatches"], orders)
        if type(data["name"]) is not str or passes not in PASSES:
            raise ScheduleError(f"a schedule called {data['name']!r:.80} with barriers and lookups of {passes!r:.80}")
        schedule = Schedule(data["name"], placement, data["microbatches"], orders, *passes)
        return Document(schedule, Costs.from_dict(data["costs"]) if "costs" in data else None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ScheduleError(f"JSON that describes no schedule: {error!r:.200}; write it with `to_json`") from None


def _orders(rows: Sequence[Sequence[str]]) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(map(parse_step, row)) for row in rows)


def save(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> None:
    """Writes a file by its ending: .csv (torch's letters) or .json."""
    text = to_csv(schedule) if _ending(path) == ".csv" else to_json(schedule, costs)
    Path(path).write_text(text, encoding="utf-8")


def load(path: str | Path) -> Schedule:
    """Reads a file by its ending: .csv (named after the file) or .json."""
    ending, text = _ending(path), read_text(path, ScheduleError)
    if ending == ".json":
        return from_dict(parse_json(text, ScheduleError)).schedule
    return from_csv(text, name=Path(path).stem)


def _ending(path: str | Path) -> str:
    ending = Path(path).suffix
    if ending not in ENDS_OF_SCHEDULES:
        raise ScheduleError(f"{path}: ending {ending!r}; expected .csv or .json")
    return ending
