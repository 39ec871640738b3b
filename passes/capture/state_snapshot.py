"""Snapshots of the module state: forward is undone after a trace, and what it changed is named."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zbcompile.passes.module_state import (
    MAX_DEPTH,
    MUTABLE,
    Reader,
    items_of,
    modules_of,
    read_cell,
    state_values,
    token_of,
)
from zbcompile.passes.torch_private_hooks import forward_hook_tables

HOOKS, SUBMODULES = "the hooks of ", "the submodules of "  # paths that begin with these are tables


class StateSnapshot:
    """The values of the module state, the items of containers among them, and the submodules and
    hooks of all modules."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._entries = [
            (path, read, key, read(key)) for path, read, key in state_values(model, loss)
        ]
        self._attributes: list[tuple[str, dict[str, Any], set[str]]] = []
        tables: list[tuple[str, Any]] = []
        for path, module in modules_of(model, loss):
            attributes = vars(module)
            self._attributes.append((path, attributes, set(attributes)))
            self._entries.append((f"{path}.training", attributes.get, "training", module.training))
            tables.append((f"{SUBMODULES}{path}", attributes["_modules"]))
            tables += [(f"{HOOKS}{path}", table) for table in forward_hook_tables(module)]
        self.values = {path: value for path, _, _, value in self._entries}
        containers = {id(c): (path, c) for path, v in self.values.items() for c in _containers(v)}
        self._tables = [
            (path, table, table.copy()) for path, table in (*tables, *containers.values())
        ]

    def installed_hooks(self) -> bool:
        """Returns True if forward has installed hooks on modules without any.

        `restore` then returns to the state with these hooks and with the flags that forward set,
        but for tensors and containers.
        """
        hooks = [(table, copy) for path, table, copy in self._tables if path.startswith(HOOKS)]
        changed = [copy for table, copy in hooks if list(table) != list(copy)]
        if not changed or any(changed):
            return False
        for table, copy in hooks:
            copy.update(table)
        flags = [(path, read, key, read(key), value) for path, read, key, value in self._entries]
        self._entries = [(*entry, now if _is_flag(now) else value) for *entry, now, value in flags]
        for _, attributes, names in self._attributes:
            names.update(name for name, value in attributes.items() if _is_flag(value))
        return True

    def restore(self) -> list[tuple[str, bool]]:
        """Undoes what was changed since. Returns the paths, and whether a tensor is passed on to
        the next forward."""
        changed: list[tuple[str, bool]] = []
        for path, attributes, names in self._attributes:
            for name in [name for name in attributes if name not in names and name[0] != "_"]:
                changed.append((f"{path}.{name}", False))
                del attributes[name]
        for path, table, items in self._tables:
            if [*map(id, items_of(table))] != [*map(id, items_of(items))]:
                changed.append((path, False))
                table.clear()
                table.extend(items) if isinstance(table, list | deque) else table.update(items)
        for path, read, key, value in self._entries:
            now, holder = read(key), _holder(read)
            if holder is None or now is value or token_of(now) == token_of(value):
                continue
            changed.append(
                (path, isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor))
            )
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            else:
                holder[key] = value
        return changed


def _is_flag(value: Any) -> bool:
    return not isinstance(value, (*MUTABLE, nn.Module))


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields a container, and those in it, as deep as they are compared."""
    if type(value) in (list, dict, set, deque):
        yield value
    if isinstance(value, list | tuple | dict | deque) and depth < MAX_DEPTH:
        for item in items_of(value):
            yield from _containers(item, depth + 1)


def _holder(read: Reader) -> Any:
    """Returns the table or cell that a function reads; None if it computes what it returns."""
    if isinstance(read, functools.partial):
        return read.args[0] if read.func is read_cell else None
    table = getattr(read, "__self__", None)
    return table if isinstance(table, dict) else None
