"""Structures of outputs: which tensors a model returns, and the containers around them.

torch.export accepts registered containers only. Models return dataclasses and objects of any class,
so a training step returns a flat list of tensors and keeps the structure beside the graph.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zbcompile.passes.errors import CompileError

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Position:
    """The place of a tensor in the flat list."""

    index: int


@dataclass(frozen=True)
class Structure:
    """An output with a `Position` in place of each tensor."""

    template: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Returns the output with these values in place of its tensors.

        >>> Structure({"loss": Position(0), "steps": 3}).rebuild(["loss tensor"])
        {'loss': 'loss tensor', 'steps': 3}
        """

        def value_of(child: Any, copies: dict[int, Any]) -> Any:
            if isinstance(child, Position):
                return values[child.index]
            return _map_children(child, value_of, copies)

        return value_of(self.template, {})

    __call__ = rebuild

    def to_data(self) -> Any:
        """Returns the structure as JSON values. An object becomes a mapping of its attributes.

        Raises:
            CompileError: The output contains a value that JSON cannot describe.

        >>> Structure((Position(0), [3, None])).to_data()
        {'tuple': [{'tensor': 0}, {'list': [3, None]}]}
        """
        return _to_data(self.template)

    @classmethod
    def from_data(cls, data: Any) -> "Structure":
        """Returns the structure that `to_data` wrote.

        >>> Structure.from_data({'tuple': [{'tensor': 0}, {'list': [3, None]}]}).rebuild("x")
        ('x', [3, None])
        """
        return cls(_from_data(data))


def flatten_output(value: Any) -> tuple[list[Tensor], Structure]:
    """Returns the tensors in `value` and the structure around them.

    Descends into tuples, lists, mappings, dataclasses and the attributes of plain objects.
    """
    tensors: list[Tensor] = []

    def position_of(child: Any, copies: dict[int, Any]) -> Any:
        if isinstance(child, Tensor):
            tensors.append(child)
            return Position(len(tensors) - 1)
        return _map_children(child, position_of, copies)

    return tensors, Structure(position_of(value, {}))


def _map_children(
    value: Any, function: Callable[[Any, dict[int, Any]], Any], copies: dict[int, Any]
) -> Any:
    """Returns a copy of a container with `function` applied to its children.

    `copies` has the copies so far, by the id of the original: objects may refer to each other.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        children = [function(child, copies) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if isinstance(value, list):
        return [function(child, copies) for child in value]
    if isinstance(value, Mapping):
        duplicate = copy.copy(value)
        for key, child in list(value.items()):
            duplicate[key] = function(child, copies)  # type: ignore[index]
        return duplicate
    attributes = _attributes_of(value)
    if attributes:
        duplicate = copies[id(value)] = copy.copy(value)
        for key, child in attributes.items():
            object.__setattr__(duplicate, key, function(child, copies))
        return duplicate
    return value


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object; {} for classes, modules and functions."""
    if isinstance(value, type | nn.Module | Position) or callable(value):
        return {}
    return dict(getattr(value, "__dict__", {}))


def _to_data(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Position):
        return {"tensor": value.index}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_to_data(child) for child in value]}
    is_mapping = isinstance(value, Mapping)
    children = value if is_mapping else _attributes_of(value)
    if (children or is_mapping) and all(isinstance(key, str) for key in children):
        return {"mapping": {key: _to_data(child) for key, child in children.items()}}
    raise CompileError(
        f"the model's output contains a {type(value).__name__}, which a saved program cannot "
        "describe. Return tensors, numbers, and lists, tuples and mappings of them."
    )


def _from_data(data: Any) -> Any:
    if not isinstance(data, dict):
        if not isinstance(data, _PLAIN):
            raise CompileError(f"{data!r} is no structure of an output.")
        return data
    kind, children = next(iter(data.items()), ("", None))
    if len(data) == 1 and kind == "tensor" and type(children) is int and children >= 0:
        return Position(children)
    if len(data) == 1 and kind == "mapping" and isinstance(children, dict):
        return {key: _from_data(child) for key, child in children.items()}
    if len(data) == 1 and kind in ("list", "tuple") and isinstance(children, list):
        values = [_from_data(child) for child in children]
        return values if kind == "list" else tuple(values)
    raise CompileError(f"{data!r} is no structure of an output.")
