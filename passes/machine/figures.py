"""What the figures of a profile may be. All are checked when it is made: a wrong one would be a
wrong prediction."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zbcompile.field_check import TEXT, Field
from zbcompile.passes.torch_names import NAMED

# of a positive figure: beyond these, times overflow or have no digits left
SMALLEST, LARGEST = (
    1e-15,
    1e24,
)
BETWEEN = f"from {SMALLEST:g} to {LARGEST:g}"


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= LARGEST


def _positive(value: Any) -> bool:
    return _number(value) and bool(value >= SMALLEST)


def _count(value: Any) -> bool:
    return isinstance(value, int) and _positive(value)


def _sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _rows(value: Any, row: Callable[[Any], bool]) -> bool:
    return _sequence(value) and all(_sequence(each) and row(each) for each in value)


def _tiles(value: Any) -> bool:
    areas = (
        [math.prod(tile) for tile in value]
        if _rows(value, lambda t: len(t) == 2 and all(map(_count, t)))
        else None
    )
    return areas is not None and areas == sorted(areas, reverse=True)


def _connection(value: Any) -> bool:
    given = value._asdict() if hasattr(value, "_asdict") else value
    keys = isinstance(given, Mapping) and given.keys() == {"latency", "bandwidth"}
    return (
        keys
        and _number(given["latency"])
        and given["latency"] >= 0
        and _positive(given["bandwidth"])
    )


def _table(
    holds: Callable[[str], bool] = lambda name: True, least: int = 0
) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Mapping)
        and len(value) >= least
        and all(isinstance(n, str) and holds(n) for n in value)
    )


SWITCH = Field(lambda value: isinstance(value, bool), "true or false")
POSITIVE = Field(_positive, f"a number above 0, {BETWEEN}")
AMOUNT = Field(
    lambda value: _number(value) and value >= 0, f"a number, 0 or more, up to {LARGEST:g}"
)
SHARE = Field(lambda value: _positive(value) and value <= 1, "a share above 0, of at most 1")
COUNT = Field(_count, "a whole number above 0")
TILES = Field(_tiles, "pairs of whole numbers above 0, the largest tile first")
CONNECTION = Field(
    _connection,
    f"latency (seconds, 0 or more) and bandwidth (bytes per second, above 0), {BETWEEN}",
)
PEAKS = Field(
    _table(NAMED["dtype"].__contains__, 1),
    'a table from dtypes, such as "bfloat16", to FLOP per second',
    POSITIVE,
)
SOURCES = Field(_table(), "a table of strings", TEXT)
