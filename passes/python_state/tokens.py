"""Tokens: what stands for a Python value in a record, equal for values that make the same graph.

A value that computes by itself (a number, an array, a set) has a token of its contents. An object of the user's, a
container or a module counts by what is read of it, each with a token of its own; anything else by its identity.
"""

import argparse
import array
import functools
import hashlib
import logging
import random
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from configparser import RawConfigParser
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from zbcompile.passes.python_state.executed_code import is_users_name
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.torch_private import OpOverload, storage_key

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device)
PLAIN = frozenset((*_PLAIN, torch.Size, torch.layout, torch.memory_format))
_SCALARS = (int, float, complex, str, bytes)  # a subclass computes as its base does
_BUFFERS = (bytearray, array.array, memoryview)
CONTAINERS = (list, tuple, deque, dict)
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
HOLDERS = (argparse.Namespace, UserDict, UserList, ChainMap, RawConfigParser, *_WEAK)  # of Python, like a user's own
NAMESPACES = (types.ModuleType, type, types.SimpleNamespace, types.FunctionType, threading.local)


class Absence:
    """What is not there."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Absence)

    def __hash__(self) -> int:
        return hash(Absence)

    def __repr__(self) -> str:
        return "nothing"


MISSING = Absence()


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
            return f"a tensor {type_text(value)}"
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
    if isinstance(value, Absence):
        return value
    if type(value) in PLAIN:
        return type(value).__name__, repr(value)  # 1, 1.0 and True are equal, as 0.0 and -0.0 are, but not their graphs
    if isinstance(value, torch.Tensor):
        return Identity(value, storage_key(value))
    if isinstance(value, types.FunctionType):
        return _code(value.__code__)
    if has_contents(value):
        return type(value).__name__, _contents(value)
    if isinstance(value, types.ModuleType):  # some import what they are asked for
        return Name(f"module {vars(value).get('__name__')}")
    if isinstance(value, _CONSTANT):
        names = {getattr(value, "__qualname__", str(value)), getattr(value, "__name__", "")}
        return Name(f"{getattr(value, '__module__', '')}.{' '.join(sorted(names, key=len, reverse=True)).strip()}")
    if isinstance(value, ContextVar):
        return Name(f"variable {value.name} of the context")
    if isinstance(value, Enum):
        return Name(repr(value))
    if isinstance(value, _SCALARS):
        shown = next(kind for kind in _SCALARS if isinstance(value, kind)).__repr__(value)
        return f"{type(value).__module__}.{type(value).__qualname__}", shown
    return Name(f"{type(value).__module__}.{type(value).__qualname__}") if is_followed(value) else Identity(value)


def has_contents(value: Any) -> bool:
    """Whether a value may change in place and is known by its contents."""
    return isinstance(value, (set, frozenset, *_BUFFERS)) or _is_numpys(value)


def _contents(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return str(sorted(map(repr, value)))
    form = f"{value.dtype}{list(value.shape)}" if _is_numpys(value) else getattr(value, "typecode", "")
    return f"{form} {hashlib.sha256(bytes(value) if isinstance(value, bytearray) else value.tobytes()).hexdigest()}"


def _is_numpys(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


_DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)
_CONSTANT = (type, types.BuiltinFunctionType, types.WrapperDescriptorType, logging.Logger, OpOverload)
_WRAPPERS = (functools.partial, functools.partialmethod, functools.cached_property, types.MethodType)


def is_followed(value: Any) -> bool:
    """Whether an object counts by what is read of it, not as itself."""
    if isinstance(value, (nn.Module, types.MappingProxyType, *_WRAPPERS, *_DESCRIPTORS, *CONTAINERS, *HOLDERS)):
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
    drawing = hasattr(kind, "getstate") or hasattr(kind, "bit_generator") or issubclass(kind, torch.Generator)
    return drawing or (kind.__name__ == "RandomState" and kind.__module__.startswith("numpy"))


def state_of(generator: Any) -> Any:
    """The state of a generator of Python or numpy; None for any other, which torch.export refuses."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    return generator.get_state(legacy=False) if type(generator).__name__ == "RandomState" else None
