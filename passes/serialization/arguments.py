"""The arguments of a graph's operations as JSON values, and back.

Booleans, integers, floats, strings, None and lists stand for themselves. Everything else is an object with one key, its
tag: `{"node": "linear_1"}`, `{"dtype": "float32"}`, `{"tuple": [...]}`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.errors import CompileError

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def argument_to_data(value: Any) -> Any:
    """`value` as a JSON value. Raises CompileError if it has no such form.

    >>> argument_to_data((torch.float32, [1, 2.5]))
    {'tuple': [{'dtype': 'float32'}, [1, 2.5]]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [argument_to_data(each) for each in value]
    return _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [argument_to_data(each) for each in value]}
    if isinstance(value, slice):
        return {"slice": [argument_to_data(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [argument_to_data(value.real), argument_to_data(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for tag, kind in _NAMED.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    raise CompileError(f"an argument of type {type(value).__name__} ({value!r}) cannot be saved.")


def argument_from_data(data: Any, nodes: Mapping[str, Node], device: torch.device) -> Any:
    """The argument that `argument_to_data` wrote. `nodes` are the graph's nodes so far; `device` is this process's.

    Raises CompileError for a tag that does not exist.
    """
    if isinstance(data, list):
        return [argument_from_data(each, nodes, device) for each in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    readers: dict[str, Callable[[], Any]] = {
        "node": lambda: nodes[inner],
        "float": lambda: float(inner),
        "tuple": lambda: tuple(argument_from_data(each, nodes, device) for each in inner),
        "slice": lambda: slice(*(argument_from_data(each, nodes, device) for each in inner)),
        "complex": lambda: complex(*(argument_from_data(each, nodes, device) for each in inner)),
        "device": lambda: device_from_data(inner, device),
    }
    if tag in _NAMED:
        return named(tag, inner)
    if tag not in readers:
        raise CompileError(f"an argument with the tag {tag!r}; expected one of {', '.join((*readers, *_NAMED))}.")
    return readers[tag]()


def named(tag: str, name: str) -> Any:
    """A dtype, layout or memory format of torch by its name."""
    found = getattr(torch, name, None)
    if not isinstance(found, _NAMED[tag]):
        raise CompileError(f"torch has no {tag} {name!r}.")
    return found


def device_from_data(name: str, device: torch.device) -> torch.device:
    """The device for a written name: a program stores only device types, and `device` is this process's device."""
    return device if device.type == name else torch.device(name)
