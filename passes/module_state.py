"""Module state: the plain Python values that forward and loss read besides their inputs.

They are part of the key of a compiled program: a step compares them with those at capture. Values
of other objects are read once, as with torch.export. Values that forward itself changes leave the
key.
"""

import argparse
import dis
import functools
import itertools
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.passes.graph.source_location import is_users_name
from zbcompile.passes.torch_private import (
    buffer_table,
    forward_hook_tables,
    plain_hooks,
    storage_key,
    version_of,
    without_torch_function,
)

MAX_ITEMS = 512  # of a container that are compared; of a longer one also the number of items
MAX_DEPTH = 3  # of containers in containers
PLAIN = (
    bool,
    int,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_IMMUTABLE = (*PLAIN, float, complex, types.FunctionType, types.BuiltinFunctionType, type, Enum)
_TABLES = frozenset(
    vars(nn.Module())
)  # of parameters, submodules and hooks; `training` is in the key of a program
_ABSENT = object()
Reader = Callable[[Any], Any]
Value = tuple[str, Reader, Any]  # path, a function that returns the value, and its argument


class StateEntry(NamedTuple):
    """One value: `read(key)` returns it, `token` is equal for equal values. `mutable`: it may
    change in place."""

    read: Callable[[Any], Any]
    key: Any
    value: Any
    token: Any
    mutable: bool


class RegisteredBuffer(NamedTuple):
    """A buffer of a loss module: a step reads its present value, so only which tensor it is
    counts."""

    tensor: torch.Tensor | None


class ModuleState:
    """The state of a model and its loss, by paths such as `model.dropout.p`; `without` are the
    paths left out."""

    def __init__(self, model: nn.Module, loss: Any = None, without: Set[str] = frozenset()) -> None:
        self.entries: dict[str, StateEntry] = {}
        for path, read, key in _values(model, loss):
            value = read(key)
            if value is not _ABSENT and path not in without and path not in self.entries:
                mutable = not isinstance(value, (*_IMMUTABLE, nn.Module))
                self.entries[path] = StateEntry(read, key, _kept(value), _token(value), mutable)

    def hold(self) -> bool:
        """Returns whether all values are what they were."""
        for read, key, value, token, mutable in self.entries.values():
            now = read(key)
            if (mutable or now is not value) and _token(now) != token:
                return False
        return True

    def change(self) -> str:
        """Returns the first value that differs, as `model.dropout.p: 0.1 -> 0.5`; "" if there is
        none."""
        for path, entry in self.entries.items():
            now = entry.read(entry.key)
            if _token(now) != entry.token:
                return f"{path}: {_text(entry.value)} -> {_text(now)}"
        return ""

    @property
    def memories(self) -> Set[int]:
        """The storages of the tensors among the values."""
        values = (getattr(entry.value, "tensor", entry.value) for entry in self.entries.values())
        return {storage_key(entry) for entry in values if isinstance(entry, torch.Tensor)}


class AttributeSnapshot:
    """The attributes of all modules, the other values of the module state, the items of containers
    among them, and hooks."""

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._attributes: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._entries = [(path, read, key, read(key)) for path, read, key in _values(model, loss)]
        self.values = {path: value for path, _, _, value in self._entries}
        for path, module in _modules(model, loss):
            attributes = vars(module)
            before = {
                name: attributes[name]
                for name in (*_names(module), "training")
                if name in attributes
            }
            self._attributes.append((path, attributes, before))
            self._hooks += [
                (f"the hooks of {path}", table, dict(table))
                for table in forward_hook_tables(module)
            ]
            self.values |= {f"{path}.{name}": value for name, value in before.items()}
        containers = {
            id(container): (path, container)
            for path, value in self.values.items()
            for container in _containers(value)
        }
        self._containers = [(path, value, value.copy()) for path, value in containers.values()]

    def installed_hooks(self) -> bool:
        """Returns True if forward has installed hooks on modules without any.

        `restore` then returns to the state with these hooks and with the flags that forward set,
        but for tensors and containers.
        """
        changed = [hooks for _, table, hooks in self._hooks if list(table) != list(hooks)]
        if not changed or any(changed):
            return False
        self._hooks = [(path, table, dict(table)) for path, table, _ in self._hooks]
        for _, attributes, before in self._attributes:
            for name, value in attributes.items():
                is_flag = not isinstance(
                    value, torch.Tensor | nn.Module | list | tuple | dict | set | deque
                )
                if is_flag and name not in _TABLES and (name[0] != "_" or name in before):
                    before[name] = value
        return True

    def restore(self) -> list[tuple[str, bool]]:
        """Undoes what was changed since. Returns the paths, and whether a tensor or hooks are
        passed on to the next forward."""
        changed: list[tuple[str, bool]] = []
        for path, attributes, before in self._attributes:
            for name in [
                attribute
                for attribute in attributes
                if attribute not in before and attribute not in _TABLES and attribute[0] != "_"
            ]:
                changed.append((f"{path}.{name}", False))
                del attributes[name]
            for name, value in before.items():
                now = attributes.get(name, _ABSENT)
                if now is not value and _token(now) != _token(value):
                    carries = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
                    changed.append((f"{path}.{name}", carries))
                attributes[name] = value
        for path, value, items in self._containers:
            if [*map(id, _items(value))] != [*map(id, _items(items))]:
                changed.append((path, False))
                value.clear()
                value.extend(items) if isinstance(value, list | deque) else value.update(items)
        for path, read, key, value in self._entries:
            now, holder = read(key), _holder(read)
            is_module = isinstance(value, nn.Module) or isinstance(now, nn.Module)
            if holder is None or is_module or now is value or _token(now) == _token(value):
                continue
            carries = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
            changed.append((path, carries))
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            elif value is _ABSENT:
                del holder[key]
            else:
                holder[key] = value
        for path, table, hooks in self._hooks:
            if list(table) != list(hooks):
                changed.append((path, True))
                table.clear()
                table.update(hooks)
        return changed


def _names(module: nn.Module) -> Iterator[str]:
    """Yields the attributes of a module, but for torch's own private ones."""
    is_users_class = is_users_name(type(module).__module__)
    return (
        name for name in vars(module) if name not in _TABLES and (is_users_class or name[0] != "_")
    )


def functions_of(model: nn.Module, loss: Any = None) -> list[types.FunctionType]:
    """Returns the user's functions: forwards of modules, functions that modules hold, hooks, and
    those of the loss, with what decorators wrap."""
    functions: dict[int, types.FunctionType] = {}
    for _, module in _modules(model, loss):
        for function in (getattr(type(module), "forward", None), *vars(module).values()):
            if isinstance(function, types.FunctionType):
                functions[id(function)] = function
    for called in (loss, *(hook for _, hook in _hooks(model, loss))):
        function = _function_of(called)
        if function is not None:
            functions[id(function)] = function
    for function in list(functions.values()):
        while (
            isinstance(function := getattr(function, "__wrapped__", None), types.FunctionType)
            and id(function) not in functions
        ):
            functions[id(function)] = function
    return [function for function in functions.values() if is_users_name(function.__module__)]


def _function_of(called: Any) -> types.FunctionType | None:
    """Returns the function behind a partial, a method or an object that is called."""
    while called is not None and not isinstance(called, types.FunctionType):
        inner = (
            getattr(called, "func", None)
            or getattr(called, "__func__", None)
            or vars(type(called)).get("__call__")
        )
        kinds = types.FunctionType | types.MethodType | functools.partial
        is_wrapped = isinstance(inner, kinds) and not isinstance(called, nn.Module)
        called = inner if is_wrapped else None
    return called


def _hooks(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, Any]]:
    """Yields the hooks of modules and of their parameters."""
    for path, module in _modules(model, loss):
        with without_torch_function():
            parameters = [plain_hooks(p) or {} for p in module.parameters(recurse=False)]
        tables = (*forward_hook_tables(module), *parameters)
        hooks = [hook for table in tables for hook in table.values() if callable(hook)]
        for number, hook in enumerate(hooks):
            yield f"hook {number} of {path}", hook


def globals_in(code: types.CodeType) -> frozenset[str]:
    """Returns the globals that code reads, with the functions inside of it; `co_names` has
    attributes as well."""
    inner = (globals_in(item) for item in code.co_consts if isinstance(item, types.CodeType))
    loads = [i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return frozenset(load.argval for load in loads).union(*inner)


def _values(model: nn.Module, loss: Any) -> Iterator[Value]:
    """Yields the path, the reader and the key of every value that is compared."""
    configs: set[int] = set()
    for path, module in _modules(model, loss):
        attributes = vars(module)
        yield f"the class of {path}", type, module
        yield f"the number of attributes of {path}", len, attributes
        children: dict[str, Any] = attributes.get("_modules") or {}
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield f"the order of submodules in {path}", tuple, children
        for name in children:
            yield f"{path}.{name}", _reader(children, name), name
        for name in _names(module):
            yield f"{path}.{name}", _reader(attributes, name), name
            if _is_config(name, attributes[name]) and id(attributes[name]) not in configs:
                configs.add(id(attributes[name]))
                yield from _of_object(f"{path}.{name}", attributes[name])
    for path, module in _modules(None, loss):
        yield f"{path}.training", _reader(vars(module), "training"), "training"
        for name in buffer_table(module):
            yield f"{path}.{name}", functools.partial(_registered, buffer_table(module)), name
    for path, called in (("loss", loss), *_hooks(model, loss)):
        yield from _of_callable(path, called)
    names: Counter[str] = Counter()
    for function in functions_of(model, loss):
        name = function.__qualname__
        names[name] += 1
        yield from _of_function(f"{name} ({names[name]})" if names[name] > 1 else name, function)


def _modules(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, nn.Module]]:
    for root, name in ((model, "model"), (loss, "loss"), (getattr(loss, "__self__", None), "loss")):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            yield f"{name}.{path}".rstrip("."), module


def _is_config(name: str, value: Any) -> bool:
    """Returns whether the values inside of an object count."""
    is_namespace = is_dataclass(value) or isinstance(
        value, types.SimpleNamespace | argparse.Namespace
    )
    is_excluded = isinstance(value, type | types.ModuleType | nn.Module)
    return (name == "config" or is_namespace) and not is_excluded and hasattr(value, "__dict__")


def _of_callable(path: str, called: Any) -> Iterator[Value]:
    """Yields the values of a partial, a method or an object that is called."""
    if isinstance(called, functools.partial):
        yield f"{path}.args", functools.partial(getattr, called), "args"
        for key in called.keywords:
            yield f"{path}.{key}", _reader(called.keywords, key), key
        yield from _of_callable(path, called.func)
    elif isinstance(called, types.MethodType):
        yield from _of_callable(path, called.__self__)
    elif not isinstance(called, nn.Module | types.FunctionType | type) and is_users_name(
        type(called).__module__
    ):
        yield from _of_object(path, called)
        for name, value in getattr(called, "__dict__", {}).items():
            if _is_config(name, value):
                yield from _of_object(f"{path}.{name}", value)


def _of_object(path: str, value: Any) -> Iterator[Value]:
    for key in getattr(value, "__dict__", ()):
        yield f"{path}.{key}", _reader(vars(value), key), key


def _of_function(function_name: str, function: types.FunctionType) -> Iterator[Value]:
    """Yields what a function names directly: globals, variables of its closure, defaults; of a
    namespace its values."""
    for name in sorted(globals_in(function.__code__) & function.__globals__.keys()):
        path, value = f"{function.__globals__.get('__name__')}.{name}", function.__globals__[name]
        yield path, _reader(function.__globals__, name), name
        if _is_config(name, value):
            yield from _of_object(path, value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        path, value = f"{name} in the closure of {function_name}", _of_cell(cell, name)
        yield path, functools.partial(_of_cell, cell), name
        if _is_config(name, value):
            yield from _of_object(path, value)
    for name in ("__defaults__", "__kwdefaults__"):
        yield f"{function_name}.{name}", functools.partial(getattr, function), name


def _of_cell(cell: types.CellType, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _ABSENT


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields a container, and those in it, as deep as they are compared."""
    if type(value) in (list, dict, set, deque):
        yield value
    if isinstance(value, list | tuple | dict | deque) and depth < MAX_DEPTH:
        for item in _items(value):
            yield from _containers(item, depth + 1)


def _holder(read: Reader) -> Any:
    """Returns the table or cell that a function reads; None if it computes what it returns."""
    if isinstance(read, functools.partial):
        return read.args[0] if read.func in (_get, _of_cell) else None
    table = getattr(read, "__self__", None)
    return table if isinstance(table, dict) else None


def _reader(table: Mapping[str, Any], key: str) -> Reader:
    return functools.partial(_get, table) if table.get(key) is None else table.get


def _get(table: Mapping[str, Any], key: str) -> Any:
    return table.get(key, _ABSENT)


def _registered(table: Mapping[str, Any], key: str) -> RegisteredBuffer:
    return RegisteredBuffer(table.get(key))


def _token(value: Any, depth: int = 0) -> Any:
    """Returns what is equal for values that make the same graph: of an object its identity."""
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, their graphs are not
    if isinstance(value, _IMMUTABLE):
        return type(value), value
    if isinstance(value, RegisteredBuffer):
        return id(value.tensor), None if value.tensor is None else storage_key(value.tensor)
    if isinstance(value, torch.Tensor):  # Python may have decided by its value
        return id(value), storage_key(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, types.MethodType):
        return _token(value.__func__), id(value.__self__)
    if isinstance(value, functools.partial):
        return _token(value.func), _token(value.args), _token(value.keywords)
    if isinstance(value, list | tuple | dict | set | frozenset | deque) and depth < MAX_DEPTH:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else _items(value)
        tokens = (_token(item, depth + 1) for item in itertools.islice(items, MAX_ITEMS))
        return type(value), len(value), tuple(tokens)
    return id(value)


def _items(value: Any) -> Iterable[Any]:
    return itertools.chain.from_iterable(dict.items(value)) if isinstance(value, dict) else value


def _kept(value: Any, depth: int = 0) -> Any:
    """Returns a value, or a copy of a container, which may change in place."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {key: _kept(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | deque) and depth < MAX_DEPTH:
        return [_kept(item, depth + 1) for item in value]
    return set(value) if isinstance(value, set) else value


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    plain = isinstance(value, (*PLAIN, float, complex, list, tuple, dict, set))
    text = getattr(value, "__qualname__", "") or (
        repr(value) if plain else f"a {type(value).__name__}"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
