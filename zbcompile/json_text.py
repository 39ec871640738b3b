"""JSON that a person can read and compare: the outer levels one entry a line, what is inside them
on that line; and dataclasses from it, with every field of its type."""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_text(value: Any, depth: int) -> str:
    """`value` as JSON whose outermost `depth` levels are broken into lines. Ends with a newline.

    >>> print(to_text({"stage": 0, "nodes": [{"op": "output", "args": [1, 2]}]}, 2), end="")
    {
    "stage": 0,
    "nodes": [
    {"op": "output", "args": [1, 2]}
    ]
    }
    """
    return _broken(value, depth) + "\n"


def _broken(value: Any, depth: int) -> str:
    if depth == 0 or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [f"{json.dumps(key)}: {_broken(each, depth - 1)}" for key, each in value.items()]
    else:
        opening, closing = "[]"
        items = [_broken(each, depth - 1) for each in value]
    return f"{opening}\n" + ",\n".join(items) + f"\n{closing}"


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass of numbers, texts, tuples of these and other such dataclasses, from what `asdict`
    made of it, through JSON.

    Raises TypeError for a name that it lacks, and for a value that is not of the type of its field.
    """
    hints = get_type_hints(kind)
    made = kind(**{name: _value_of(hints.get(name), value) for name, value in data.items()})
    for name, hint in hints.items():
        if not _fits(getattr(made, name), hint):
            raise TypeError(f"{name} of {kind.__name__} is {getattr(made, name)!r}")
    return made


def _value_of(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return from_plain(hint, value)
    return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin in (UnionType, Union):
        return any(_fits(value, each) for each in inner)
    if origin is not tuple:
        return type(value) in ((int, float) if hint is float else (hint,))
    if not isinstance(value, tuple):
        return False
    wanted = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
    return len(value) == len(wanted) and all(map(_fits, value, wanted))
