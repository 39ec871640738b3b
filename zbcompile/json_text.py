"""JSON that a person can read and compare: the outer levels one entry a line, what is inside them on that line."""

import json
from typing import Any


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
