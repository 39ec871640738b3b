"""Module state: the plain Python values that forward and loss read besides their inputs.

They are part of the key of a compiled program: a step compares them with those at capture. Values
of other objects are read once, as with torch.export. Values that forward itself changes leave the
key.
"""

import argparse
import dis
import functools
import itertools
import reprlib
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from zbcompile.passes.graph.source_location import is_users_name
from zbcompile.passes.torch_private import (
    buffer_table,
    storage_key,
    version_of,
    without_torch_function,
)
from zbcompile.passes.torch_private_hooks import forward_hook_tables, plain_hooks

MAX_ITEMS = 512  # of a container that are compared; of a longer one also the number of items
MAX_DEPTH = 3  # of containers in containers
PLAIN = (
    *(bool, int, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_IMMUTABLE = (*PLAIN, float, complex, types.FunctionType, types.BuiltinFunctionType, type, Enum)
MUTABLE = (list, tuple, dict, set, frozenset, deque, torch.Tensor, functools.partial)
# Of parameters, submodules and hooks; `training` is in the key of a program.
_TABLES = frozenset(vars(nn.Module()))
ABSENT = object()
Reader = Callable[[Any], Any]
Value = tuple[str, Reader, Any]  # path, a function that returns the value, and its argument


class ModuleState:
    """The state of a model and its loss, by paths such as `model.dropout.p`; `without` are the
    paths left out."""

    def __init__(self, model: nn.Module, loss: Any = None, without: Set[str] = frozenset()) -> None:
        # By path: a function that returns a value, its argument, the value, its token, and for a
        # value that may change in place its text.
        self.entries: dict[str, tuple[Reader, Any, Any, Any, str]] = {}
        for path, read, key in state_values(model, loss):
            value = read(key)
            if value is not ABSENT and path not in without and path not in self.entries:
                text = _text(value) if isinstance(value, MUTABLE) else ""
                self.entries[path] = read, key, value, token_of(value), text

    def change(self) -> str:
        """Returns the first value that differs, as `model.dropout.p: 0.1 -> 0.5`; "" if there is
        none."""
        for path, (read, key, value, token, text) in self.entries.items():
            now = read(key)
            if (text or now is not value) and token_of(now) != token:
                return f"{path}: {text or _text(value)} -> {_text(now)}"
        return ""


def attribute_names(module: nn.Module) -> Iterator[str]:
    """Yields the attributes of a module, but for torch's own private ones."""
    is_users_class = is_users_name(type(module).__module__)
    return (
        name for name in vars(module) if name not in _TABLES and (is_users_class or name[0] != "_")
    )


def functions_of(model: nn.Module, loss: Any = None) -> list[types.FunctionType]:
    """Returns the user's functions: forwards of modules, functions that modules hold, hooks, and
    those of the loss, with what decorators wrap."""
    starts = [loss, *(hook for _, hook in _hooks(model, loss))]
    for _, module in modules_of(model, loss):
        held = (getattr(type(module), "forward", None), *vars(module).values())
        starts += [value for value in held if isinstance(value, types.FunctionType)]
    functions: dict[int, types.FunctionType] = {}
    for called in starts:
        while called is not None and id(called) not in functions:
            if isinstance(called, types.FunctionType):
                functions[id(called)] = called
            called = _called_by(called)
    return [function for function in functions.values() if is_users_name(function.__module__)]


def _called_by(called: Any) -> Any:
    """Returns what a partial, method, decorated function or object calls; None for others."""
    if isinstance(called, functools.partial):
        return called.func
    if isinstance(called, types.MethodType):
        return called.__func__
    if isinstance(called, nn.Module | type):
        return None
    inner = getattr(called, "__wrapped__", None) or vars(type(called)).get("__call__")
    kinds = types.FunctionType | types.MethodType | functools.partial
    return inner if isinstance(inner, kinds) else None


def _hooks(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, Any]]:
    """Yields the hooks of modules and of their parameters."""
    for path, module in modules_of(model, loss):
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


def state_values(model: nn.Module, loss: Any) -> Iterator[Value]:
    """Yields the path, the reader and the key of every value that is compared."""
    configs: set[int] = set()
    for path, module in modules_of(model, loss):
        attributes = vars(module)
        yield f"the class of {path}", type, module
        yield f"the number of attributes of {path}", len, attributes
        children: dict[str, Any] = attributes.get("_modules") or {}
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield f"the order of submodules in {path}", tuple, children
        for name in children:
            yield f"{path}.{name}", children.get, name
        for name in attribute_names(module):
            yield f"{path}.{name}", attributes.get, name
            if _is_config(name, attributes[name]) and id(attributes[name]) not in configs:
                configs.add(id(attributes[name]))
                yield from _of_object(f"{path}.{name}", attributes[name])
    for path, module in modules_of(None, loss):
        yield f"{path}.training", vars(module).get, "training"
        for name in buffer_table(module):
            yield f"{path}.{name}", functools.partial(_registered, buffer_table(module)), name
    for path, called in (("loss", loss), *_hooks(model, loss)):
        yield from _of_callable(path, called)
    names: Counter[str] = Counter()
    for function in functions_of(model, loss):
        name = function.__qualname__
        names[name] += 1
        yield from _of_function(f"{name} ({names[name]})" if names[name] > 1 else name, function)


def modules_of(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model and its loss by path."""
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
            yield f"{path}.{key}", called.keywords.get, key
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
        yield f"{path}.{key}", vars(value).get, key


def _of_function(function_name: str, function: types.FunctionType) -> Iterator[Value]:
    """Yields what a function names directly: globals, variables of its closure, defaults; of a
    namespace its values."""
    for name in sorted(globals_in(function.__code__) & function.__globals__.keys()):
        path, value = f"{function.__globals__.get('__name__')}.{name}", function.__globals__[name]
        yield path, function.__globals__.get, name
        if _is_config(name, value):
            yield from _of_object(path, value)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        path, value = f"{name} in the closure of {function_name}", read_cell(cell, name)
        yield path, functools.partial(read_cell, cell), name
        if _is_config(name, value):
            yield from _of_object(path, value)
    for name in ("__defaults__", "__kwdefaults__"):
        yield f"{function_name}.{name}", functools.partial(getattr, function), name


def read_cell(cell: types.CellType, _: str) -> Any:
    """Returns the value of a variable of a closure; ABSENT if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _registered(table: Mapping[str, Any], key: str) -> Any:
    """Returns which tensor a buffer of a loss module is. A step reads its present value."""
    tensor = table.get(key)
    return None if tensor is None else (id(tensor), storage_key(tensor))


def token_of(value: Any, depth: int = 0) -> Any:
    """Returns what is equal for values that make the same graph: of an object its identity."""
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, their graphs are not
    if isinstance(value, _IMMUTABLE):
        return type(value), value
    if isinstance(value, torch.Tensor):  # Python may have decided by its value
        return id(value), storage_key(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, types.MethodType):
        return token_of(value.__func__), id(value.__self__)
    if isinstance(value, functools.partial):
        return token_of(value.func), token_of(value.args), token_of(value.keywords)
    if isinstance(value, list | tuple | dict | set | frozenset | deque) and depth < MAX_DEPTH:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else items_of(value)
        tokens = (token_of(item, depth + 1) for item in itertools.islice(items, MAX_ITEMS))
        return type(value), len(value), tuple(tokens)
    return id(value)


def items_of(value: Any) -> Iterable[Any]:
    """Returns the items of a container; of a dict its keys and values by turns."""
    if not isinstance(value, dict):
        return value
    kind = OrderedDict if isinstance(value, OrderedDict) else dict  # which has another order
    return itertools.chain.from_iterable(kind.items(value))


def _text(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, (*PLAIN, float, complex)):
        text = repr(value)
    elif isinstance(value, list | tuple | dict | set):
        text = reprlib.repr(value)  # which survives items that cannot be shown
    else:
        text = getattr(value, "__qualname__", f"a {type(value).__name__}")
    return text if len(text) <= 60 else f"{text[:57]}..."
