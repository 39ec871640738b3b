"""Structures of outputs: which tensors a model returns, and how to rebuild the value around them.

torch.export accepts registered containers only. Models return dataclasses and objects of any class,
so a training step returns a flat list of tensors, and an OutputStructure rebuilds the output.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.unsupported import RETURNS_A_NUMBER
from zbcompile.passes.errors import CaptureError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def output_names(output: Any) -> list[str]:
    """Returns the keys or attributes of a model's output that are not None; [] for a tensor."""
    values = output if isinstance(output, Mapping) else vars_of(output)
    return [str(name) for name, value in values.items() if value is not None]


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
        return tuple(
            leaf
            for _, leaf, is_leaf in self._entries
            if is_leaf and not isinstance(leaf, TensorPosition)
        )

    @cached_property
    def _entries(self) -> tuple[tuple[tuple[Any, ...], Any, bool], ...]:
        return tuple(_entries(self.template, (), set()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputStructure) and self._entries == other._entries


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


def _entries(
    value: Any, path: tuple[Any, ...], seen: set[int]
) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yields (path, type, False) for containers and (path, value, True) for leaves."""
    children = _children(value)
    if children is None:
        yield path, value, True
        return
    yield path, type(value), False
    if id(value) not in seen:
        seen.add(id(value))
        for key, child in children.items():
            yield from _entries(child, (*path, key), seen)


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
