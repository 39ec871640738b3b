"""Premises: the Python values that forward and loss read while they were captured, beside their inputs.

The graph has them as constants, so it is right only while they are what they were. A record of them is data: steps from
the model, the loss or a module's globals to each value. Two models built alike have equal records.
"""

import functools
import hashlib
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from zbcompile.passes.torch_private import OpOverload, children_of, forward_hook_functions, module_tables, storage_key
from zbcompile.passes.values.executed_code import is_users_name

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device)
PLAIN = frozenset((*_PLAIN, torch.Size, torch.layout, torch.memory_format))
CONTAINERS = (list, tuple, deque, dict)
MOST = 64  # items of a container that are told apart
_ERRORS = (LookupError, AttributeError, TypeError, ValueError)


class Missing:
    """What is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@dataclass(frozen=True)
class Read:
    """One value that was read: `step` by `key` from the value of the read numbered `parent` (-1: from a root). `saw`
    stands for the value: equal for values that make the same graph."""

    path: str
    parent: int
    step: str
    key: Any
    saw: Any


@dataclass(frozen=True)
class Identity:
    """Stands for an object that only itself equals; of a tensor, as long as it keeps its memory."""

    value: Any
    memory: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value and self.memory == other.memory

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor):
            return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return getattr(value, "__qualname__", "") or f"a {type(value).__name__}"


@dataclass(frozen=True)
class Name:
    """Stands for an object by what it is called: what is read of it is read separately, or it never changes."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Code:
    """Stands for a function by its code; what surrounds it is read separately."""

    name: str
    line: int
    digest: str

    def __repr__(self) -> str:
        return f"{self.name} of line {self.line}"


@functools.lru_cache(maxsize=4096)
def _code(code: types.CodeType) -> Code:
    constants = [_code(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants
    return Code(code.co_qualname, code.co_firstlineno, hashlib.sha256(repr(parts).encode()).hexdigest())


def _constant(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def token(value: Any) -> Any:
    """What stands for a value in a record."""
    if isinstance(value, Missing):
        return value
    if type(value) in PLAIN:
        return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, as 0.0 and -0.0 are, but not their graphs
    if isinstance(value, torch.Tensor):
        return Identity(value, storage_key(value))
    if isinstance(value, types.FunctionType):
        return _code(value.__code__)
    if isinstance(value, set | frozenset):
        return type(value).__name__, str(sorted(map(repr, value)))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return type(value).__name__, f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, types.ModuleType):  # some import what they are asked for
        return Name(f"module {vars(value).get('__name__')}")
    if isinstance(value, _CONSTANT):
        return Name(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}")
    if isinstance(value, ContextVar):
        return Name(f"variable {value.name} of the context")
    if isinstance(value, Enum):
        return Name(repr(value))
    return Name(f"{type(value).__module__}.{type(value).__qualname__}") if is_followed(value) else Identity(value)


_DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)
_CONSTANT = (type, types.BuiltinFunctionType, types.WrapperDescriptorType, logging.Logger, OpOverload)


def is_followed(value: Any) -> bool:
    """Whether an object counts by what is read of it, not as itself."""
    if isinstance(value, (nn.Module, functools.partial, types.MethodType, *_DESCRIPTORS, *CONTAINERS)):
        return True
    return is_users(type(value)) and not isinstance(value, Enum | type | types.ModuleType) and not is_generator(value)


def is_users(kind: Any) -> bool:
    """Whether a class, function or module is none of Python's, torch's or ours."""
    if isinstance(kind, types.ModuleType):
        return is_users_name(vars(kind).get("__name__"))
    return is_users_name(getattr(kind, "__module__", None))


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers."""
    kind = type(value)  # an object that imports what it is asked for is asked for nothing
    return hasattr(kind, "getstate") or hasattr(kind, "bit_generator") or issubclass(kind, torch.Generator)


def attribute(value: Any, name: str) -> Any:
    """What is stored for an attribute, in the object, in a module's tables or in its class; no code of it runs."""
    own = vars_of(value)
    if name in own:
        return own[name]
    for table in module_tables(value):
        if name in table:
            return table[name]
    owner = owner_of(type(value), name)
    raw = vars(owner)[name] if owner is not None else MISSING
    return raw.__get__(value) if isinstance(raw, types.MemberDescriptorType) else raw


def owner_of(kind: type, name: str) -> type | None:
    """The class that defines an attribute of instances of `kind`."""
    return next((each for each in kind.__mro__ if name in vars(each)), None)


def vars_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else dict(found)


def _size(value: Any) -> Any:
    return ", ".join(map(repr, dict.keys(value))) if isinstance(value, dict) else len(value)


STEPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "attribute": attribute,
    "tensor": attribute,
    "own": lambda value, name: vars(value).get(name, MISSING),  # of a Python module, class or function
    "item": lambda value, key: dict.__getitem__(value, key) if isinstance(value, dict) else value[key],
    "size": lambda value, _: _size(value),
    "children": lambda value, _: ", ".join(children_of(value)),
    "child": lambda value, name: children_of(value)[name],
    "hook": lambda value, number: forward_hook_functions(value)[number],
    "cell": lambda value, number: value.__closure__[number].cell_contents,
    "part": getattr,  # of what Python's own classes hold: partials, methods, functions
}


def step_from(value: Any, step: str, key: Any) -> Any:
    """One step from a value."""
    try:
        return STEPS[step](value, key)
    except _ERRORS:
        return MISSING


@dataclass(frozen=True)
class Premises:
    """What one capture read, each value after the one that it was read from. `globals` are those of code that is in no
    imported module, by its name."""

    reads: tuple[Read, ...] = ()
    globals: Mapping[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_portable(self) -> bool:
        """Whether another process, which has built the same model, can tell whether they hold."""
        return not self.globals and not any(isinstance(read.saw, Identity) for read in self.reads)

    def values(self, roots: Mapping[str, Any]) -> list[Any]:
        """What stands now where each value was read; `roots` are the model and the loss."""
        found: list[Any] = []
        for read in self.reads:
            if read.step == "root":
                found.append(roots[read.key])
            elif read.step == "globals":
                found.append(self.globals[read.key] if read.key in self.globals else vars(sys.modules[read.key]))
            else:
                found.append(step_from(found[read.parent], read.step, read.key))
        return found

    def changes(self, roots: Mapping[str, Any]) -> Iterator[str]:
        """Every value that is another one now, in words."""
        for read, value in zip(self.reads, self.values(roots), strict=True):
            if read.step != "globals" and (now := token(value)) != read.saw:
                yield f"{read.path}, changed from {_text(read.saw)} to {_text(now)}"

    @property
    def memories(self) -> frozenset[int]:
        """Those of the tensors that were read, by their keys."""
        return frozenset(read.saw.memory for read in self.reads if isinstance(read.saw, Identity) and read.saw.memory)

    @property
    def digest(self) -> str:
        """Equal for equal records of processes that run the same code."""
        return hashlib.sha256("\n".join(f"{r.path} {r.step} {r.saw!r}" for r in self.reads).encode()).hexdigest()


def _text(saw: Any) -> str:
    return str(saw[1]) if isinstance(saw, tuple) else repr(saw)


Look = tuple[Callable[[Any], Any], Any, Any]


class Standing:
    """Premises of a process's own model and loss. A step asks only whether each place still has the same object, which
    takes 50 nanoseconds; where one has not, the values are compared."""

    def __init__(self, premises: Premises, roots: Mapping[str, Any]) -> None:
        self.premises, self._roots = premises, roots
        self._looks = self._made()

    def hold(self) -> bool:
        """Whether all values are what they were."""
        for look, key, expected in self._looks:
            try:
                now = look(key)
            except _ERRORS:
                return self._compare()
            if now is not expected and not (type(now) is int is type(expected) and now == expected):
                return self._compare()
        return True

    def change(self) -> str:
        """The first value that is another one, in words; "" if there is none."""
        return next(self.premises.changes(self._roots), "")

    def _compare(self) -> bool:
        if self.change():
            return False
        self._looks = self._made()  # an equal value stands there
        return True

    def _made(self) -> list[Look]:
        values = self.premises.values(self._roots)
        found: dict[Any, Look] = {}
        for read, value in zip(self.premises.reads, values, strict=True):
            parent = values[read.parent] if read.parent >= 0 else None
            for look in _looks(parent, read, value):
                found.setdefault((_subject(look[0]), look[1] if isinstance(look[1], str) else id(look[1])), look)
        return list(found.values())


def _subject(look: Any) -> Any:
    return id(getattr(look, "__self__", look)), getattr(look, "__name__", "")  # a partial is one of its own


def _looks(parent: Any, read: Read, value: Any) -> Iterator[Look]:
    """What to look at in a step to see the same value."""
    key = read.key
    if isinstance(value, torch.Tensor) and isinstance(read.saw, Identity):
        yield storage_key, value, read.saw.memory
    if read.step in ("attribute", "tensor"):
        yield from _at_attribute(parent, key, value)
    elif read.step == "own":
        yield vars(parent).get, key, None if isinstance(value, Missing) else value
    elif read.step == "item" and not isinstance(parent, tuple):
        get = functools.partial(dict.get, parent) if isinstance(parent, dict) else parent.__getitem__
        yield (parent.get if type(parent) is dict else get), key, value
    elif read.step == "size" and not isinstance(parent, tuple):
        yield len, parent, len(parent)
    elif read.step == "children":
        yield len, children_of(parent), len(children_of(parent))
    elif read.step == "child":
        yield children_of(parent).get, key, value
    elif read.step == "cell":
        yield functools.partial(getattr, parent.__closure__[key]), "cell_contents", value
    elif read.step == "part" and parent is not None:
        yield functools.partial(getattr, parent), key, value
    if isinstance(value, nn.Module) or (is_followed(value) and is_users(type(value))):
        yield type, value, type(value)


def _at_attribute(parent: Any, name: str, value: Any) -> Iterator[Look]:
    own = vars_of(parent)
    if name in own:
        yield own.get, name, value
        return
    yield own.__contains__, name, False
    for table in module_tables(parent):
        if name in table or isinstance(value, Missing):
            yield table.get, name, table.get(name)
    owner = owner_of(type(parent), name)
    if owner is not None:
        raw = vars(owner)[name]
        if isinstance(raw, types.MemberDescriptorType):
            yield functools.partial(getattr, parent), name, value
        else:
            yield vars(owner).get, name, raw
