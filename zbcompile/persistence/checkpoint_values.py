"""Python values as JSON, and back: what a checkpoint holds besides tensors.

None, booleans, integers, strings, finite floats and lists stand for themselves. Everything else is
an object with one key, its tag: `{"tuple": [1, 2]}`, `{"dict": {"lr": 0.1}}`, `{"tensor":
"extra.rate"}`.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zbcompile.errors import PipelineError

Tensors = dict[str, torch.Tensor]
_MAPPINGS: Mapping[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}


def to_data(value: Any, path: str, tensors: Tensors) -> Any:
    """`value` as a JSON value; its tensors are added to `tensors` under their place in it, which
    begins with `path`.

    Raises PipelineError, with the place, for a value that has no such form.

    >>> to_data({"rate": (0.5, None)}, "extra", {})
    {'dict': {'rate': {'tuple': [0.5, None]}}}
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError:
        raise PipelineError(
            f"{path} is nested too deeply, or contains itself; a checkpoint cannot hold it."
        ) from None


def _encode(value: Any, path: str, tensors: Tensors) -> Any:
    kind = type(value)
    if kind in (bool, int, str, type(None)) or (kind is float and math.isfinite(value)):
        return value
    if kind is list or kind is tuple:
        items = [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _TAGS and all(type(key) is str for key in value):
        return {_TAGS[kind]: {k: _encode(v, f"{path}.{k}", tensors) for k, v in value.items()}}
    if kind in _TAGS:
        pairs = [
            [_encode(k, f"{path}.key {k}", tensors), _encode(v, f"{path}.{k}", tensors)]
            for k, v in value.items()
        ]
        return {_TAGS[kind]: pairs}
    if kind is float or kind is complex:
        return {kind.__name__: repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if (
        kind in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
    ):
        tensors[path] = value
        return {"tensor": path}
    raise PipelineError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold;"
        " expected None, numbers, strings, bytes, dense tensors, or lists, tuples and dicts of"
        " these."
    )


def from_data(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `to_data` made. Raises KeyError, TypeError or ValueError for data of another
    form."""
    if isinstance(data, list):
        return [from_data(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    if tag in _MAPPINGS:
        if isinstance(inner, dict):
            return _MAPPINGS[tag]({key: from_data(item, tensors) for key, item in inner.items()})
        return _MAPPINGS[tag](dict(from_data(inner, tensors)))
    readers: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda items: tuple(from_data(items, tensors)),
        "float": float,
        "complex": complex,
        "bytes": bytes.fromhex,
        "tensor": tensors.__getitem__,
    }
    return readers[tag](inner)
