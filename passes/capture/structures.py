"""Structures of outputs: which tensors a model returns, and how to rebuild the value around them.

torch.export accepts registered containers only. Models return dataclasses and objects of any class,
so a training step returns a flat list of tensors, and an OutputStructure rebuilds the output.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.unsupported import RETURNS_A_NUMBER
from zbcompile.passes.errors import CaptureError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True)
class TensorPosition:
    """The place of a tensor in the flat list."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class OutputStructure:
    """An output in which every tensor is replaced by its position in a flat list.

    Structures are equal if their containers have the same types and keys, and their constants the
    same values.
    """

    template: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Returns a copy of the output with other tensors."""
        return _map_leaves(
            self.template,
            lambda leaf: values[leaf.index] if isinstance(leaf, TensorPosition) else leaf,
            {},
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves that are no tensors, such as numbers and None."""
        constants: list[Any] = []

        def collect(leaf: Any) -> Any:
            constants.extend(() if isinstance(leaf, TensorPosition) else (leaf,))
            return leaf

        _map_leaves(self.template, collect, {})
        return tuple(constants)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OutputStructure):
            return False
        return _description(self.template) == _description(other.template)


def flatten_output(value: Any) -> tuple[list[Tensor], OutputStructure]:
    """Returns the tensors in `value` and the structure around them.

    Descends into tuples, lists, mappings, dataclasses and the attributes of plain objects.

    >>> tensors, structure = flatten_output({"loss": Tensor([1.0]), "steps": 3})
    >>> structure.rebuild(["loss tensor"]), structure.constants
    ({'loss': 'loss tensor', 'steps': 3}, (3,))
    """
    tensors: list[Tensor] = []

    def without_tensor(leaf: Any) -> Any:
        if isinstance(leaf, _NUMBERS):
            raise CaptureError(RETURNS_A_NUMBER)
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return TensorPosition(len(tensors) - 1)

    return tensors, OutputStructure(_map_leaves(value, without_tensor, {}))


def _description(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Returns what is equal for containers of equal types, keys and leaves."""
    children = _children(value)
    if children is None:
        return value
    if id(value) in outer:
        return outer.index(id(value))
    inside = [(k, _description(child, (*outer, id(value)))) for k, child in children.items()]
    return type(value), inside


def _children(value: Any) -> dict[Any, Any] | None:
    """Returns the children of a container by key; None for a leaf."""
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    return vars_of(value) or None


def _map_leaves(value: Any, function: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Returns a copy of a value with `function` applied to everything that is no container."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        children = [_map_leaves(child, function, copies) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if isinstance(value, list):
        return [_map_leaves(child, function, copies) for child in value]
    if isinstance(value, Mapping):
        duplicate = copy.copy(value)
        for key, child in list(value.items()):
            duplicate[key] = _map_leaves(child, function, copies)  # type: ignore[index]
        return duplicate
    if attributes := vars_of(value):
        duplicate = copies[id(value)] = copy.copy(value)
        for key, child in attributes.items():
            object.__setattr__(duplicate, key, _map_leaves(child, function, copies))
        return duplicate
    return function(value)


def vars_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object; {} for tensors, modules, functions and objects without
    any."""
    if (
        isinstance(value, (Tensor, TensorPosition, nn.Module, *_NUMBERS))
        or callable(value)
        or type(value).__module__ == "builtins"
    ):
        return {}
    return dict(getattr(value, "__dict__", {}))
