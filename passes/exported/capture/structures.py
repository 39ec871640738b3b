"""Structures of outputs: which tensors a model returns, and how to rebuild the value around them.

torch.export accepts registered containers only. Models return dataclasses and objects of any class,
so a training step returns a flat list of tensors and keeps the structure beside the graph.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Rebuild = Callable[[Sequence[Any]], Any]


def flatten_output(value: Any) -> tuple[list[Tensor], Rebuild]:
    """Returns the tensors in `value` and a function that rebuilds `value` from other tensors.

    Descends into tuples, lists, mappings, dataclasses and the attributes of plain objects.

    >>> tensors, rebuild = flatten_output({"loss": Tensor([1.0]), "steps": 3})
    >>> rebuild(["loss tensor"])
    {'loss': 'loss tensor', 'steps': 3}
    """
    tensors: list[Tensor] = []
    template = _replace_tensors(value, tensors, {})
    return tensors, lambda values: _restore(template, values, {})


@dataclasses.dataclass(frozen=True)
class _Position:
    """The place of a tensor in the flat list."""

    index: int


def _replace_tensors(value: Any, tensors: list[Tensor], copies: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Position(len(tensors) - 1)
    return _map_children(value, lambda child: _replace_tensors(child, tensors, copies), copies)


def _restore(template: Any, values: Sequence[Any], copies: dict[int, Any]) -> Any:
    if isinstance(template, _Position):
        return values[template.index]
    return _map_children(template, lambda child: _restore(child, values, copies), copies)


def _map_children(value: Any, function: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Returns a copy of a container with `function` applied to its children."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        children = [function(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if isinstance(value, list):
        return [function(child) for child in value]
    if isinstance(value, Mapping):
        duplicate = copy.copy(value)
        for key, child in list(value.items()):
            duplicate[key] = function(child)  # type: ignore[index]
        return duplicate
    if not isinstance(value, type) and type(value).__module__ != "builtins" and vars_of(value):
        duplicate = copies[id(value)] = copy.copy(value)
        for key, child in vars_of(value).items():
            object.__setattr__(duplicate, key, function(child))
        return duplicate
    return value


def vars_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object; {} for modules, functions and objects without any."""
    from torch import nn

    if isinstance(value, nn.Module) or callable(value):
        return {}
    return dict(getattr(value, "__dict__", {}))
