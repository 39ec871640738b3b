"""Reports: tables of figures for a terminal, a log and JSON."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from zbcompile.amounts import format_bytes, format_count, format_share, format_time, plain

WIDTH = 100  # characters of a line of text


@dataclass(frozen=True)
class Figure:
    """One value of a report. `unit` is a key of `FORMATS`, or is written next to the name; `per`
    says what the value belongs to: a microbatch, a step."""

    name: str
    value: Any
    unit: str = ""
    per: str = ""


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "s": lambda value: format_time(value, "s"),
    "FLOP": format_count,
    "B": format_bytes,
    "parameters": lambda value: format_count(value, "B"),
    "share": format_share,
    "ratio": lambda value: f"{value:.2f}",
}


@dataclass(frozen=True)
class Table:
    """Rows of figures, whose names are the columns.

    Attributes:
        name: The key of the table in JSON.
        upright: True for one row, whose figures are written below each other.
        notes: Sentences below the rows.
        picture: A text that a terminal shows in place of the rows.
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
    """Returns a table of one row, upright."""
    return Table(name, title, (tuple(figures),), notes, upright=True)


def format_figure(figure: Figure) -> str:
    """Returns the value with its unit.

    >>> format_figure(Figure("kept", 16384, "B")), format_figure(Figure("ranks", (0, 3)))
    ('16.0 KiB', '0, 3')
    """
    value = figure.value
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return FORMATS[figure.unit](value) if figure.unit in FORMATS else plain(value, 5)


def to_text(tables: Iterable[Table]) -> str:
    """Returns tables for a terminal, without those that have nothing to show.

    >>> table = Table("stages", "Stages", [(Figure("stage", 0), Figure("sends", 2048, "B"))])
    >>> print(to_text([table]), end="")
    Stages
    <BLANKLINE>
    stage    sends
    -----  -------
        0  2.0 KiB
    """
    return "\n\n".join(part for table in tables for part in _parts(table) if part) + "\n"


def _parts(table: Table) -> list[str]:
    if not (table.rows or table.notes or table.picture):
        return []
    body = table.picture
    if table.rows and not body:
        body = _upright(table.rows[0]) if table.upright else grid(table.rows)
    notes = "\n".join(line for note in table.notes for line in wrap(note))
    return ["\n".join(wrap(table.title, "")), body, notes]


def wrap(text: str, indent: str = "  ") -> list[str]:
    """Returns the lines of a sentence."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _upright(row: Sequence[Figure]) -> str:
    cells = [[figure.name, format_figure(figure)] for figure in row if format_figure(figure)]
    width = WIDTH - 2 - max(len(name) for name, _ in cells)
    return _without_trailing_spaces(
        tabulate(cells, tablefmt="plain", disable_numparse=True, maxcolwidths=[None, width])
    )


def grid(rows: Sequence[Sequence[Figure]]) -> str:
    """Returns rows under the names of their figures: numbers to the right, words to the left."""
    columns: dict[str, list[Figure]] = {}
    for figure in (figure for row in rows for figure in row):
        columns.setdefault(figure.name, []).append(figure)
    heads = {
        name: name if not unit or unit in FORMATS else f"{name} ({unit})"
        for name, (first, *_) in columns.items()
        for unit in [first.unit]
    }
    cells = [{figure.name: format_figure(figure) for figure in row} for row in rows]
    is_word = {
        name: all(figure.value is None or isinstance(figure.value, str) for figure in figures)
        for name, figures in columns.items()
    }
    body = [[row.get(name, "") for name in columns] for row in cells]
    lines = tabulate(  # heads as a row: tabulate pads its own
        [[*heads.values()], SEPARATING_LINE, *body],
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left" if is_word[name] else "right" for name in columns],
    ).splitlines()
    return _without_trailing_spaces("\n".join(lines[1:-1]))


def _without_trailing_spaces(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def to_data(tables: Sequence[Table]) -> dict[str, Any]:
    """Returns tables for JSON: each under its name as a list of objects (an upright one as an
    object), and, by table, the `units` of its figures and its `notes`."""
    data: dict[str, Any] = {}
    units: dict[str, dict[str, str]] = {}
    for table in tables:
        rows = [{figure.name: figure.value for figure in row} for row in table.rows]
        data[table.name] = rows[0] if table.upright else rows
        named = {
            figure.name: f"{figure.unit} per {figure.per}" if figure.per else figure.unit
            for row in table.rows
            for figure in row
            if figure.unit
        }
        if named:
            units[table.name] = named
    notes = {table.name: list(table.notes) for table in tables if table.notes}
    return {**data, "units": units, "notes": notes}
