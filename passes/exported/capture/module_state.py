"""Module state: the plain Python values that a model's forward may read from its modules.

They are part of the key of a compiled program. torch restores attributes after a trace, so a
training step compares the state at its beginning and at its end to find what forward changes.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

MAX_ITEMS = 64  # larger containers are not part of the state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_ABSENT = object()


class StateEntry(NamedTuple):
    """One value of the module state: `table[key] == value`, known to the user as `path`."""

    table: dict[str, Any]
    key: str
    value: Any


class ModuleState(dict[str, StateEntry]):
    """Entries by path, such as `model.dropout.p`."""

    def changes(self, after: "ModuleState") -> "ModuleState":
        """Returns the entries of `after` that are new or have another value than here."""
        return ModuleState(
            (path, entry)
            for path, entry in after.items()
            if path not in self or self[path].value != entry.value
        )

    def difference(self) -> str:
        """Returns the first entry whose present value differs, as `path: before -> now`, or ""."""
        for path, (table, key, value) in self.items():
            current = table.get(key, _ABSENT)
            if current is value:
                continue
            snapshot = _snapshot(current)
            if snapshot != value:
                return f"{path}: {value!r} -> {current!r}"
        return ""


def module_state(module: nn.Module) -> ModuleState:
    """Returns the plain values in `vars` of every submodule.

    Numbers, strings, None, functions by identity, containers of at most 64 of those, and one level
    of an attribute named `config` or of a dataclass.
    """
    state = ModuleState()
    for prefix, submodule in module.named_modules():
        for key, value in vars(submodule).items():
            if key.startswith("_") or key == "training":
                continue
            path = f"{prefix}.{key}" if prefix else key
            _add(state, vars(submodule), key, path)
            if key == "config" or (is_dataclass(value) and not isinstance(value, type)):
                names = [f.name for f in fields(value)] if is_dataclass(value) else None
                table = getattr(value, "__dict__", {})
                for name in names or list(table):
                    if name in table and not name.startswith("_"):
                        _add(state, table, name, f"{path}.{name}")
    return state


def _add(state: ModuleState, table: dict[str, Any], key: str, path: str) -> None:
    snapshot = _snapshot(table[key])
    if snapshot is not _ABSENT:
        state[path] = StateEntry(table, key, snapshot)


def _snapshot(value: Any) -> Any:
    """Returns an immutable copy of a plain value; a marker for other values."""
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return value
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= MAX_ITEMS:
        return _items(value, list(value) if not isinstance(value, set | frozenset) else value)
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return _items(value, [*value, *value.values()])
    return _ABSENT


def _items(container: Any, items: Any) -> Any:
    plain: Callable[[Any], bool] = lambda item: isinstance(item, (*_PLAIN, *_FUNCTIONS))  # noqa: E731
    if not all(map(plain, items)):
        return _ABSENT
    kind = type(container).__name__
    return kind, frozenset(items) if isinstance(container, set | frozenset) else tuple(items)
