"""What the fields of a record may hold, for records that files bring: all are checked when one is
made, and the error names the field, what was received and what was expected. Imports nothing of the
library, so all rooms may import it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any


@dataclass(frozen=True)
class Field:
    """What holds of a value, in words too; `each` is for what is in a table or a list."""

    holds: Callable[[Any], bool]
    expected: str
    each: "Field | None" = None

    def or_none(self) -> "Field":
        return Field(lambda value: value is None or self.holds(value), self.expected, self.each)


def wrong_field(fields: Mapping[str, Field], given: Mapping[str, Any]) -> str | None:
    """The first of `given` that cannot be: where, received, expected.

    >>> wrong_field({"sizes": Field(bool, "at least one", AMOUNT)}, {"sizes": [1, -2]})
    'sizes[1]=-2; expected a finite number, 0 or more.'
    """
    found = (each for name, value in given.items() for each in _wrong(name, value, fields[name]))
    return next(found, None)


def _wrong(where: str, value: Any, field: Field) -> Iterator[str]:
    if not field.holds(value):
        yield f"{where}={short(value)}; expected {field.expected}."
    elif field.each is not None and value is not None:
        table = isinstance(value, Mapping)
        if field.each.each is None and all(
            map(field.each.holds, value.values() if table else value)
        ):
            return
        for name, item in value.items() if table else enumerate(value):
            place = f"[{name}]" if not table else f".{name}" if name != "" else '.""'
            yield from _wrong(f"{where}{place}", item, field.each)


def wrong_names(
    known: Collection[str], required: Collection[str], given: Collection[Any]
) -> str | None:
    """Which names of `given` are unknown, and which required ones are missing; None if all
    is well."""
    unknown = ", ".join(sorted(map(str, set(given) - set(known))))
    missing = ", ".join(sorted(set(required) - set(given)))
    what = [f"unknown {unknown:.200}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
    return f"{'; '.join(what)}; expected some of {', '.join(known)}." if what else None


def is_amount(value: Any) -> bool:
    """Whether `value` is a number, finite and not negative; True and False are none."""
    try:
        return not isinstance(value, bool) and value >= 0 and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


TEXT = Field(lambda value: isinstance(value, str), "a string")
AMOUNT = Field(is_amount, "a finite number, 0 or more")
NUMBER = Field(lambda value: type(value) is int, "a whole number")
