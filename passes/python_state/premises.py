"""Premises: the Python values that forward and loss read while they were captured, besides their inputs.

The graph has them as constants, so it is right only while they are what they were. A record of them is data: steps from
the model, the loss or a module's globals to each value. Two models built alike have equal records.
"""

import contextlib
import functools
import gc
import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zbcompile.passes.python_state.tokens import MISSING, Absence, Identity, has_contents, is_followed, is_users, token
from zbcompile.passes.torch_private import children_of, forward_hook_functions, module_tables, storage_key

MOST = 64  # items of a container that are told apart, if the others are plain
_ERRORS = (LookupError, AttributeError, TypeError, ValueError)


@dataclass(frozen=True)
class ValueRead:
    """One value that was read: `step` by `key` from the value of the read numbered `parent` (-1: from a root). `saw`
    stands for the value: equal for values that make the same graph."""

    path: str
    parent: int
    step: str
    key: Any
    saw: Any


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


_JOINED = "_joined_loss"  # in a model that trains with a loss as its submodule `loss`, and in copies of it


def join(model: nn.Module, loss: nn.Module) -> None:
    """Make a loss the submodule `loss` of a model, of which forward sees nothing: eager's model has none."""
    model.add_module("loss", loss)
    vars(model)[_JOINED] = loss


def without_joined_loss(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, a model has no loss that it was joined with."""
    own = vars_of(model)  # shared by the proxies that torch's tracer may hand out
    modules = own.get("_modules", {})
    loss = own.get(_JOINED)
    if loss is None or modules.get("loss") is not loss:
        return contextlib.nullcontext()
    return _without_loss(own, modules)


@contextlib.contextmanager
def _without_loss(own: dict[str, Any], modules: dict[str, Any]) -> Iterator[None]:
    before, loss = list(modules), modules["loss"]
    del modules["loss"], own[_JOINED]
    try:
        yield
    finally:
        now = {"loss": loss, **modules}
        modules.clear()  # in the same order as before
        modules.update({name: now[name] for name in (*before, *now) if name in now})
        own[_JOINED] = loss


def owner_of(kind: type, name: str) -> type | None:
    """The class that defines an attribute of instances of `kind`."""
    return next((each for each in kind.__mro__ if name in vars(each)), None)


def vars_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else dict(found)


def names_of(value: Any) -> list[str]:
    return list(vars_of(value))


def items_of(value: Any) -> list[Any]:
    """The items of a container, of a mapping pairs, in order. No code of a subclass runs: some import what they are
    asked for."""
    if isinstance(value, dict):
        return list((OrderedDict if isinstance(value, OrderedDict) else dict).items(value))
    return list(value)


def _size(value: Any) -> Any:
    return ", ".join(repr(key) for key, _ in items_of(value)) if isinstance(value, dict) else len(value)


def _rest(value: Any) -> str:
    """The items of a long container that are not told apart, as a digest."""
    return hashlib.sha256(repr(items_of(value)[MOST:]).encode()).hexdigest()


STEPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "attribute": attribute,
    "tensor": attribute,
    "trains": lambda value, name: attribute(value, name).requires_grad,  # of a parameter of a module
    "own": lambda value, name: vars(value).get(name, MISSING),  # of a Python module, class or function
    "item": lambda value, key: dict.__getitem__(value, key) if isinstance(value, dict) else value[key],
    "size": lambda value, _: _size(value),
    "children": lambda value, _: ", ".join(children_of(value)),
    "child": lambda value, name: children_of(value)[name],
    "hooks": lambda value, _: len(forward_hook_functions(value)),
    "hook": lambda value, number: forward_hook_functions(value)[number],
    "cell": lambda value, number: value.__closure__[number].cell_contents,
    "part": getattr,  # of what Python's own classes hold: partials, methods, functions
    "names": lambda value, _: ", ".join(names_of(value)),
    "rest": lambda value, _: _rest(value),
    "class": lambda value, _: type(value),
    "mapping": lambda value, _: gc.get_referents(value)[0],  # behind a proxy
    "referent": lambda value, _: value(),  # of a weak reference
    "context": lambda value, _: value.get(),
    "library": lambda value, name: vars(value).get(name, MISSING),
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

    reads: tuple[ValueRead, ...] = ()
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
            elif read.step == "module":
                found.append(sys.modules[read.key])
            elif read.step == "globals":
                found.append(self.globals[read.key] if read.key in self.globals else vars(sys.modules[read.key]))
            else:
                found.append(step_from(found[read.parent], read.step, read.key))
        return found

    def changes(self, roots: Mapping[str, Any]) -> Iterator[str]:
        """Every value that is another one now, in words."""
        for read, value in zip(self.reads, self.values(roots), strict=True):
            if read.step not in ("globals", "module") and (now := token(value)) != read.saw:
                yield f"{read.path}, changed from {_text(read.saw)} to {_text(now)}"

    @property
    def memories(self) -> frozenset[int]:
        """Those of the tensors that were read, by their keys."""
        return frozenset(read.saw.memory for read in self.reads if isinstance(read.saw, Identity) and read.saw.memory)


def _text(saw: Any) -> str:
    return str(saw[1]) if isinstance(saw, tuple) else repr(saw)


Look = tuple[Callable[[Any], Any], Any, Any]


def _same_number(now: Any, expected: Any) -> bool:
    return type(now) is int is type(expected) and now == expected


class StandingPremises:
    """Premises of a process's own model and loss. A step asks only whether each place still has the same object, which
    takes 50 nanoseconds; where one has not, the values are compared."""

    def __init__(self, premises: Premises, roots: Mapping[str, Any]) -> None:
        self.premises, self._roots = premises, roots
        with without_joined_loss(roots["model"]):
            self._looks = self._made()

    def hold(self) -> bool:
        """Whether all values are what they were."""
        with without_joined_loss(self._roots["model"]):
            return self._find_all() or self._compare()

    def _find_all(self) -> bool:
        try:
            for look, key, expected in self._looks:
                now = look(key)
                if now is not expected and not _same_number(now, expected):
                    return False
        except _ERRORS:
            return False
        return True

    def change(self) -> str:
        """The first value that is another one, in words; "" if there is none."""
        with without_joined_loss(self._roots["model"]):
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
                of = id(getattr(look[0], "__self__", look[0])), getattr(look[0], "__name__", "")  # a partial: its own
                found.setdefault((of, look[1] if isinstance(look[1], str) else id(look[1])), look)
        return list(found.values())


def _looks(parent: Any, read: ValueRead, value: Any) -> Iterator[Look]:
    """What to look at in a step to see the same value."""
    key = read.key
    if isinstance(value, torch.Tensor) and isinstance(read.saw, Identity):
        yield storage_key, value, read.saw.memory
    elif has_contents(value):
        yield functools.partial(_gives, token, read.saw), value, True
    if read.step in ("attribute", "tensor"):
        yield from _at_attribute(parent, key, value)
    elif read.step in ("own", "library"):
        yield from _at_key(vars(parent), key, value)
    elif read.step == "item" and isinstance(parent, dict):
        yield from _at_key(parent, key, value)
    elif read.step == "item" and not isinstance(parent, tuple):
        yield parent.__getitem__, key, value
    elif read.step == "size" and not isinstance(parent, tuple):
        yield len, parent, len(parent)
        if isinstance(parent, dict) and 1 < len(parent) <= MOST:
            yield _still(tuple, parent)
    elif read.step == "rest" and not isinstance(parent, tuple):
        yield _still(items_of, parent)
    elif read.step == "names":
        yield _still(names_of, parent)
    elif read.step == "children":
        yield len, children_of(parent), len(children_of(parent))
    elif read.step == "child":
        yield children_of(parent).get, key, value
    elif read.step == "hooks":
        yield _still(forward_hook_functions, parent)
    elif read.step == "class":
        yield functools.partial(getattr, value), "__name__", value.__name__
    elif read.step == "cell":
        yield functools.partial(getattr, parent.__closure__[key]), "cell_contents", value
    elif read.step == "part" and parent is not None:
        yield functools.partial(getattr, parent), key, value
    elif read.step in ("referent", "context", "trains"):
        yield functools.partial(step_from, parent, read.step), key, value
    if isinstance(value, nn.Module) or (is_followed(value) and is_users(type(value))):
        yield type, value, type(value)
    elif isinstance(value, types.FunctionType):
        yield functools.partial(getattr, value), "__code__", value.__code__


def _at_key(table: Any, key: Any, value: Any) -> Iterator[Look]:
    """Looks that find the same value, or still none, at a key of a mapping."""
    if value is None or isinstance(value, Absence):
        yield table.__contains__, key, value is None
    if not isinstance(value, Absence):
        is_subclass = isinstance(table, dict) and type(table) is not dict
        yield (functools.partial(dict.get, table) if is_subclass else table.get), key, value


def _still(of: Callable[[Any], Any], value: Any) -> Look:
    """A look that finds that a function of a value gives what it gives now."""
    return functools.partial(_gives, of, of(value)), value, True


def _gives(of: Callable[[Any], Any], before: Any, value: Any) -> bool:
    return bool(of(value) == before)


def _at_attribute(parent: Any, name: str, value: Any) -> Iterator[Look]:
    own = vars_of(parent)
    if name in own:
        yield from _at_key(own, name, value)
        return
    yield own.__contains__, name, False
    for table in module_tables(parent):
        if name in table or isinstance(value, Absence):
            yield from _at_key(table, name, table.get(name, MISSING))
    owner = owner_of(type(parent), name)
    for kind in type(parent).__mro__[: None if owner is None else type(parent).__mro__.index(owner)]:
        if is_users(kind):
            yield vars(kind).get, name, None
    if owner is not None:
        raw = vars(owner)[name]
        if isinstance(raw, types.MemberDescriptorType):
            yield functools.partial(getattr, parent), name, value
        else:
            yield vars(owner).get, name, raw
