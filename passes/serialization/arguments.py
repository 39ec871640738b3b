"""The arguments of a graph's operations as JSON values, and back.

Booleans, integers, floats, strings, None and lists stand for themselves. Everything else is an object with one key, its
tag: `{"node": "linear_1"}`, `{"dtype": "float32"}`, `{"tuple": [...]}`.

Graph compilers copy strings into the source that they generate and do not always escape them (inductor, torch 2.13:
the message of an assertion, in C++). So strings may not contain a character that could end a literal.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes import gpu
from zbcompile.passes.errors import CompileError
from zbcompile.passes.torch_names import NAMED, name_in_torch, named

DEVICES = ("cpu", gpu.KIND)
_TEXT = re.compile(r"[\w ,.:>*+-]*", re.ASCII)  # of the modes and equations that torch's operators take


def argument_to_data(value: Any) -> Any:
    """`value` as a JSON value. Raises CompileError if it has no such form.

    >>> argument_to_data((torch.float32, [1, 2.5]))
    {'tuple': [{'dtype': 'float32'}, [1, 2.5]]}
    """
    if isinstance(value, str):
        return _plain_text(value)
    if value is None or isinstance(value, bool | int):
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
    if (found := name_in_torch(value)) is not None:
        return dict([found])
    raise CompileError(f"an argument of type {type(value).__name__} ({value!r}) cannot be saved.")


def argument_from_data(data: Any, nodes: Mapping[str, Node], device: torch.device) -> Any:
    """The argument that `argument_to_data` wrote. `nodes` are the graph's nodes so far; `device` is this process's.

    Raises CompileError for a tag or node that does not exist, and for a string that could end a literal in generated
    code.
    """
    if isinstance(data, str):
        return _plain_text(data)
    if isinstance(data, list):
        return [argument_from_data(each, nodes, device) for each in data]
    if not isinstance(data, dict):
        return data
    readers: dict[str, Callable[[Any], Any]] = {
        "node": lambda inner: _node_named(inner, nodes),
        "float": _float_from_data,
        "tuple": lambda inner: tuple(_each(inner, nodes, device)),
        "slice": lambda inner: slice(*_each(inner, nodes, device)),
        "complex": lambda inner: complex(*map(_finite, _each(inner, nodes, device))),
        "device": lambda inner: device_from_data(inner, device),
        **{tag: partial(named, tag) for tag in NAMED},
    }
    tag, inner = next(iter(data.items()), ("", None))
    if len(data) != 1 or tag not in readers:
        raise CompileError(f"an argument with the tags {list(data)}; expected one of {', '.join(readers)}.")
    return readers[tag](inner)


def _plain_text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise CompileError(
            f"an argument is the text {text!r}; expected only letters, digits, spaces and , . : > * + -, as in the "
            "names of modes and in equations."
        )
    return text


def _each(inner: Any, nodes: Mapping[str, Node], device: torch.device) -> list[Any]:
    if not isinstance(inner, list):
        raise CompileError(f"an argument holds {inner!r}; expected a list.")
    return [argument_from_data(each, nodes, device) for each in inner]


def _node_named(name: Any, nodes: Mapping[str, Node]) -> Node:
    if not isinstance(name, str) or name not in nodes:
        raise CompileError(f"an argument is the result of {name!r}; no operation before it is called so.")
    return nodes[name]


def _float_from_data(text: Any) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise CompileError(f"{text!r} is no float that needs a tag; expected inf, -inf or nan.")
    return float(text)


def _finite(part: Any) -> float:
    """A part of a complex number, which must be finite: generated code would read "inf" and "nan" as names."""
    if not isinstance(part, int | float) or not math.isfinite(part):
        raise CompileError(f"{part!r} is no part of a complex number; expected a finite one.")
    return part


def device_from_data(name: Any, device: torch.device) -> torch.device:
    """The device for a written name: a program stores only device types, and `device` is this process's device."""
    if name not in (device.type, *DEVICES):
        raise CompileError(f"{name!r} is no kind of device; expected {' or '.join(DEVICES)}.")
    return device if device.type == name else torch.device(name)
