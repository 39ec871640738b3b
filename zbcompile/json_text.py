"""JSON that a person can read and compare, and records as JSON values.

`to_plain` and `from_plain` convert dataclasses, named tuples and containers by the types of their
fields. `converters` have a function for every other type.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Converters = Mapping[type, Callable[[Any], Any]]


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
        items = [f"{json.dumps(key)}: {_broken(item, depth - 1)}" for key, item in value.items()]
    else:
        opening, closing = "[]"
        items = [_broken(item, depth - 1) for item in value]
    return f"{opening}\n" + ",\n".join(items) + f"\n{closing}"


def to_plain(value: Any, converters: Converters) -> Any:
    """Returns records, mappings and tuples as JSON values."""
    convert = converters.get(type(value))
    if convert is not None:
        return convert(value)
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return {name: to_plain(getattr(value, name), converters) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry, converters) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(entry, converters) for entry in value]
    return value


def from_plain(hint: Any, data: Any, converters: Converters) -> Any:
    """Returns the value of type `hint` that `to_plain` wrote.

    Raises TypeError if a value is not of the type of its field, KeyError if a field is missing.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in converters:
        return converters[hint](data)
    if origin in (UnionType, Union):
        return _from_union(args, data, converters)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        values = {field.name: (hints[field.name], data[field.name]) for field in fields(hint)}
        return hint(**{name: from_plain(*pair, converters) for name, pair in values.items()})
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        pairs = zip(get_type_hints(hint).values(), data, strict=True)
        return hint(*(from_plain(*pair, converters) for pair in pairs))
    if origin in (tuple, Sequence) and isinstance(data, list):
        repeated = origin is Sequence or args[-1] is Ellipsis
        hints_of_items = args[:1] * len(data) if repeated else args
        pairs = zip(hints_of_items, data, strict=True)
        return tuple(from_plain(*pair, converters) for pair in pairs)
    if origin in (dict, Mapping) and isinstance(data, dict):
        key, entry = args
        return {
            int(name) if key is int else name: from_plain(entry, item, converters)
            for name, item in data.items()
        }
    if origin is Literal:
        fits = any(type(data) is type(choice) and data == choice for choice in args)
    else:
        fits = type(data) in ((int, float) if hint is float else (hint,))
    if not fits:
        raise TypeError(f"received {data!r:.80}; expected {getattr(hint, '__name__', hint)}")
    return data


def _from_union(hints: Sequence[Any], data: Any, converters: Converters) -> Any:
    """Returns the value of the first type that fits."""
    if data is None and NoneType in hints:
        return None
    *candidates, last = [hint for hint in hints if hint is not NoneType]
    for hint in candidates:
        try:
            return from_plain(hint, data, converters)
        except (TypeError, ValueError, KeyError):
            continue
    return from_plain(last, data, converters)
