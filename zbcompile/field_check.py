"""Checks the fields of records that are read from files.

All fields are checked when a record is made. The error names the field, the value received and the
value expected. Imports nothing of the library, so all packages may import it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any


@dataclass(frozen=True)
class Field:
    """A condition for a value and its text. `items` is for the values in a table or a list."""

    is_valid: Callable[[Any], bool]
    expected: str
    items: "Field | None" = None

    def or_none(self) -> "Field":
        return Field(lambda value: value is None or self.is_valid(value), self.expected, self.items)


def wrong_field(fields: Mapping[str, Field], values: Mapping[str, Any]) -> str | None:
    """The first of `values` that cannot be: where, received, expected.

    >>> wrong_field({"sizes": Field(bool, "at least one", AMOUNT)}, {"sizes": [1, -2]})
    'sizes[1]=-2; expected a finite number, 0 or more.'
    """
    errors = (
        error for name, value in values.items() for error in _wrong(name, value, fields[name])
    )
    return next(errors, None)


def _wrong(where: str, value: Any, field: Field) -> Iterator[str]:
    if not field.is_valid(value):
        yield f"{where}={short(value)}; expected {field.expected}."
    elif field.items is not None and value is not None:
        table = isinstance(value, Mapping)
        if field.items.items is None and all(
            map(field.items.is_valid, value.values() if table else value)
        ):
            return
        for name, item in value.items() if table else enumerate(value):
            place = f"[{name}]" if not table else f".{name}" if name != "" else '.""'
            yield from _wrong(f"{where}{place}", item, field.items)


def wrong_names(
    names: Collection[str], required: Collection[str], values: Collection[Any]
) -> str | None:
    """Returns a text with the values that are not among `names` and the required ones that are
    missing, or None if there are neither."""
    unknown = ", ".join(sorted(map(str, set(values) - set(names))))
    missing = ", ".join(sorted(set(required) - set(values)))
    what = [f"unknown {unknown:.200}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
    return f"{'; '.join(what)}; expected some of {', '.join(names)}." if what else None


def is_amount(value: Any) -> bool:
    """Returns True if `value` is a finite number, 0 or more. True and False are not numbers."""
    try:
        return not isinstance(value, bool) and value >= 0 and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


TEXT = Field(lambda value: isinstance(value, str), "a string")
AMOUNT = Field(is_amount, "a finite number, 0 or more")
