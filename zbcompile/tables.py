"""Reports: tables of figures, and the loops that write them for a terminal, a log and as JSON."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbcompile.amounts import (
    format_bytes,
    format_count,
    format_share,
    format_signed,
    format_time,
    plain,
)

WIDTH = 100  # characters of a line of text
LONGEST = 40  # characters of a list in a cell


@dataclass(frozen=True)
class Figure:
    """One value of a report, as it was computed. `unit` says what it counts, and so how it is
    written (`WRITTEN`); a unit that is not known there follows the name. `per` says what the value
    is of: a microbatch, a step.
    """

    name: str
    value: Any
    unit: str = ""
    per: str = ""


WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "s": lambda value: format_time(value, "s"),
    "passes": lambda value: format_time(value, "passes"),
    "FLOP": format_count,
    "B": format_bytes,
    "parameters": lambda value: format_count(value, "B"),
    "share": format_share,
    "ratio": lambda value: f"{value:.2f}",
    "s more": lambda value: format_signed(value, lambda each: format_time(each, "s")),
    "B more": lambda value: format_signed(value, format_bytes),
}


@dataclass(frozen=True)
class Table:
    """Rows of figures, whose names are the columns, under a title. `name` is what JSON calls it.

    `upright`: one row, written below each other. `notes` are sentences below the rows, and
    `picture` what a terminal shows in place of them.
    """

    name: str
    title: str = ""
    rows: Sequence[Sequence[Figure]] = ()
    notes: Sequence[str] = ()
    upright: bool = False
    picture: str = ""


def facts(
    name: str, figures: Iterable[Figure], title: str = "", notes: Sequence[str] = ()
) -> Table:
    """A table of one row, upright."""
    return Table(name, title, (tuple(figures),), notes, upright=True)


def written(figure: Figure) -> str:
    """The value with its unit.

    >>> written(Figure("kept", 16384, "B")), written(Figure("ranks", (0, 3)))
    ('16.0 KiB', '0, 3')
    """
    value = figure.value
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    write = WRITTEN.get(figure.unit)
    return write(value) if write else plain(value, 5)


def to_text(tables: Iterable[Table]) -> str:
    """Tables for a terminal, in lines of at most `WIDTH` characters; those without anything to show
    are left out.

    >>> table = Table("stages", "Stages", [(Figure("stage", 0), Figure("sends", 2048, "B"))])
    >>> print(to_text([table]), end="")
    Stages
    <BLANKLINE>
    stage    sends
    -----  -------
        0  2.0 KiB
    """
    parts = (
        "\n\n".join(filter(None, _parts(table)))
        for table in tables
        if table.rows or table.notes or table.picture
    )
    return "\n\n".join(parts) + "\n"


def _parts(table: Table) -> Iterator[str]:
    yield "\n".join(wrap(table.title, ""))
    yield table.picture or (
        _upright(table.rows[0]) if table.upright else grid(table.rows) if table.rows else ""
    )
    yield "\n".join(line for note in table.notes for line in wrap(note))


def wrap(text: str, indent: str = "  ") -> list[str]:
    """The lines of a sentence."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _upright(row: Sequence[Figure]) -> str:
    shown = [each for each in row if written(each)]
    room = max(len(each.name) for each in shown)
    texts = (
        (each.name, f"{written(each)} {each.unit if each.unit == 'FLOP' else ''}".rstrip())
        for each in shown
    )
    return "\n".join(
        line for name, text in texts for line in wrap(f"{name:<{room}}  {text}", " " * (room + 2))
    )


def grid(rows: Sequence[Sequence[Figure]]) -> str:
    """Rows under the names of their figures: numbers to the right, words to the left."""
    cells = [{each.name: _cell(written(each)) for each in row} for row in rows]
    columns = columns_of(rows)
    room = {
        name: max(len(head), *(len(row.get(name, "")) for row in cells))
        for name, (head, _) in columns.items()
    }
    lines = [
        {name: head for name, (head, _) in columns.items()},
        {name: "-" * room[name] for name in columns},
        *cells,
    ]
    aligned = (
        "  ".join(
            f"{line.get(name, ''):{'<' if is_word else '>'}{room[name]}}"
            for name, (_, is_word) in columns.items()
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)


def _cell(text: str) -> str:
    """A list that has no room in a column, such as what each of 64 stages recomputes, is cut off;
    JSON has all of it.

    >>> _cell(",".join(["0.25"] * 64))
    '0.25,0.25,0.25,0.25,0.25,0.25,0.25,0....'
    """
    is_list = "," in text and " " not in text
    return f"{text[: LONGEST - 3]}..." if is_list and len(text) > LONGEST else text


def columns_of(rows: Sequence[Sequence[Figure]]) -> dict[str, tuple[str, bool]]:
    """The head of every column, with the unit where values do not show it, and whether the column
    holds words."""
    found: dict[str, tuple[str, bool]] = {}
    for each in (each for row in rows for each in row):
        head = each.name if each.unit in WRITTEN or not each.unit else f"{each.name} ({each.unit})"
        words = found.get(each.name, (head, True))[1] and (
            each.value is None or isinstance(each.value, str)
        )
        found[each.name] = head, words
    return found


def to_data(tables: Sequence[Table]) -> dict[str, Any]:
    """Tables for JSON: each under its name as a list of objects (an upright one as an object), and,
    by table, the `units` of its figures and its `notes`."""
    data: dict[str, Any] = {}
    units: dict[str, dict[str, str]] = {}
    for table in tables:
        rows = [{each.name: each.value for each in row} for row in table.rows]
        data[table.name] = rows[0] if table.upright else rows
        named = {
            each.name: f"{each.unit}{' per ' * bool(each.per)}{each.per}"
            for row in table.rows
            for each in row
        }
        units[table.name] = {name: unit for name, unit in named.items() if unit}
    notes = {table.name: list(table.notes) for table in tables if table.notes}
    return {
        **data,
        "units": {name: found for name, found in units.items() if found},
        "notes": notes,
    }
