"""Reached values: what forward can reach in Python from the model, the loss and the globals of its functions.

What is followed is looked into as it is found; an attribute counts once it is read, what a namespace holds (a Python
module, a class, a function) once code that names it runs.
"""

import builtins
import contextlib
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from zbcompile.passes.graph.source_location import is_users_file
from zbcompile.passes.python_state.executed_code import names_in, text_constants
from zbcompile.passes.python_state.premises import MOST, attribute, items_of, owner_of, step_from, vars_of
from zbcompile.passes.python_state.tokens import (
    CONTAINERS,
    MISSING,
    NAMESPACES,
    PLAIN,
    Absence,
    is_followed,
    is_generator,
    is_users,
    state_of,
    token,
)
from zbcompile.passes.torch_private import children_of, forward_hook_functions, forward_hook_tables, module_tables

TABLES = frozenset(vars(nn.Module()))  # modes, hooks and tensors, which others compare
_INDIRECT = frozenset(("globals", "eval", "vars", "modules", "attrgetter", "import_module", "__import__", "__dict__"))
_INDIRECT |= {"__getattribute__"}
_OF_CLASSES = frozenset(("type", "__class__", "super", "dir"))  # by which code asks a class instead of its instance
RECORDED_BY = "__getattribute__"  # of classes whose instances are watched, while they are
_BOOKKEEPING = frozenset(  # of classes: what Python and dataclasses note there about the class itself
    (RECORDED_BY, "__dataclass_fields__", "__dataclass_params__", "__annotations__", "__match_args__", "__orig_bases__")
)
_MOST_OBJECTS = 4096  # in one container
_PARTS: Mapping[Any, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


@dataclass(eq=False)
class ReachedValue:
    """A value that forward can reach. `stored` is what it held when it was found, `hooks` the tables of hooks of a
    module, each with what was in it; `asked` are the names read since, `code` that of the function in whose closure it
    is."""

    path: str
    parent: "ReachedValue | None"
    step: str
    key: Any
    value: Any
    saw: Any
    code: types.CodeType | None = None
    stored: Any = None
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = field(default_factory=list)
    asked: set[Any] = field(default_factory=set)

    @property
    def now(self) -> Any:
        return self.value if self.parent is None else step_from(self.parent.value, self.step, self.key)


class Reach:
    """All that was reached, in `found` each after what it was reached from. `patch` is called for every class whose
    instances count by what is read of them; `own` are the modules of the model, by the identity of their attributes,
    and `tensors` has those of other modules, where an export puts others in their places."""

    def __init__(
        self, own: frozenset[int], tensors: Mapping[int, Mapping[str, Any]], patch: Callable[[type], None]
    ) -> None:
        self._own, self._tensors, self._patch = own, tensors, patch
        self.found: list[ReachedValue] = []
        self.known: dict[int, ReachedValue] = {}
        self.globals: dict[str, dict[str, Any]] = {}
        self.generators: dict[str, tuple[Any, Any]] = {}  # with their states when they were found
        self._namespaces: list[ReachedValue] = []
        self._names: set[str] = set()
        self._asks_classes = self._asks_names = False

    def add(
        self,
        path: str,
        parent: ReachedValue | None,
        step: str,
        key: Any,
        value: Any,
        code: types.CodeType | None = None,
    ) -> ReachedValue:
        found = ReachedValue(path, parent, step, key, value, token(value), code)
        self.found.append(found)
        self._follow(found)
        return found

    def read(self, value: Any, name: str) -> None:
        """Somebody reads an attribute of a value."""
        own = vars_of(value)
        found = self.known.get(id(own)) or self.known.get(id(value))
        if found is None or name in found.asked:
            return
        found.asked.add(name)
        if isinstance(value, nn.Module) and (name in TABLES or _is_torchs(value, name, found.stored)):
            return
        before = found.stored.get(name, MISSING)
        if before is not MISSING:
            if own.get(name, before) is before:
                self.add(f"{found.path}.{name}", found, "attribute", name, before)
        elif name not in own and not any(table.get(name) is not None for table in module_tables(value)):
            self.add(f"{found.path}.{name}", found, "attribute", name, attribute(value, name))

    def read_trained(self, parameter: torch.Tensor, now: bool) -> None:
        """Somebody asks whether a parameter trains."""
        modules = [each for each in self.known.values() if isinstance(each.value, nn.Module)]
        for found in modules:
            for name, tensor in tensors_of(found.value).items():
                if tensor is parameter and ("trains", name) not in found.asked:
                    found.asked.add(("trains", name))
                    self.add(f"{found.path}.{name}.requires_grad", found, "trains", name, now)

    def read_all(self, value: Any) -> None:
        """Somebody reads the mapping of all attributes."""
        found = self.known.get(id(vars_of(value))) or self.known.get(id(value))
        if found is None or "__dict__" in found.asked:
            return
        found.asked.add("__dict__")
        self.add(f"the names of {found.path}", found, "names", None, step_from(value, "names", None))
        for name in list(found.stored):
            if name not in TABLES:
                self.read(value, name)

    def read_stored(self, value: Any) -> None:
        """A copy is made of a value: what it stores counts, and what that stores in turn."""
        seen, left = set[int](), [value]
        while left:
            each = left.pop()
            found = self.known.get(id(vars_of(each))) or self.known.get(id(each))
            if found is None or id(found) in seen:
                continue
            seen.add(id(found))
            if not isinstance(found.stored, dict) or isinstance(each, CONTAINERS):
                left += found.stored.values() if isinstance(found.stored, dict) else found.stored or ()
                continue
            self._follow_class(found)
            self._note_names(found)
            for name in list(found.stored):
                self.read(each, name)
            left += found.stored.values()

    def enter(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """A function begins: what it can name."""
        indirect = not _INDIRECT.isdisjoint(code.co_names)
        words = {word for text in text_constants(code) for word in re.findall(r"\w+", text)} if indirect else set()
        names = {*code.co_names, *words}
        new = names - self._names
        self._names |= new
        for each in list(self._namespaces):
            self._name(each, new)
        by_text = words | (names & space.keys()) if indirect else set()
        self.read_globals(space, {*names_in(code), *by_text})
        self._note_library("builtins", builtins)
        for module in (*names_in(code, ("IMPORT_NAME",)), *(word for word in words if word in sys.modules)):
            imported = sys.modules.get(module)
            if imported is not None and is_users(imported) and vars(imported) is not space:
                self.read_globals(vars(imported), names & vars(imported).keys())
        self._enter_indirect(code, words)
        if "vars" in code.co_names or "__dict__" in code.co_names:
            for each in [each for each in self._namespaces if isinstance(each.value, type | types.SimpleNamespace)]:
                self._name(each, set(each.stored))

    def _enter_indirect(self, code: types.CodeType, words: set[str]) -> None:
        """Code may ask a class for what its instances read, or an object in a way that leaves no trace."""
        before = list(self.known.values())
        if not (self._asks_classes or _OF_CLASSES.isdisjoint(code.co_names)):
            self._asks_classes = True
            for each in before:
                self._follow_class(each)
        if "dir" in code.co_names and not self._asks_names:
            self._asks_names = True
            for each in list(self.known.values()):
                self._note_names(each)
        if "__getattribute__" in code.co_names:
            for each in before:  # items of a dictionary are no attributes
                has = each.stored if isinstance(each.stored, dict) and not isinstance(each.value, dict) else {}
                for name in words & has.keys():
                    self.read(each.value, name)

    def note_special_methods(self, codes: Mapping[int, types.CodeType]) -> None:
        """Code of the methods that Python itself calls (`__len__`) has run: they may be replaced."""
        kinds: set[type] = set()
        for each in [each for each in self.known.values() if _is_of_users_class(each.value)]:
            kind = type(each.value)
            names = {name for base in kind.__mro__ if is_users(base) for name in _special_methods(base, codes)}
            if isinstance(each.value, nn.Module) and kind not in kinds:
                names.add("__call__")
            kinds.add(kind)
            for name in sorted(names):
                self.add(f"{each.path}.{name}", each, "attribute", name, attribute(each.value, name))

    def read_globals(self, space: dict[str, Any], names: set[str]) -> None:
        """Code names globals of a Python module."""
        key = str(space.get("__name__"))
        root = self.known.get(id(space))
        if root is None:
            if vars(sys.modules.get(key, types)) is not space:
                self.globals[key] = space
            root = self.known[id(space)] = ReachedValue(key, None, "globals", key, space, None, stored={})
            self.found.append(root)
        for name in names - root.asked:
            root.asked.add(name)
            value = space.get(name, MISSING)
            if isinstance(value, types.ModuleType) and not is_users(value):
                self._note_library(name, value)
                continue
            root.stored[name] = value
            self.add(f"{key}.{name}", root, "item", name, value)

    def _note_library(self, path: str, module: types.ModuleType) -> None:
        """A Python module that is not the user's: what he names of it may be replaced by something else."""
        name = vars(module).get("__name__")
        if id(module) not in self.known and sys.modules.get(str(name)) is module:
            found = ReachedValue(path, None, "module", name, module, None, stored=vars(module))
            self.known[id(module)] = found
            self.found.append(found)
            self._namespaces.append(found)
            self._name(found, self._names)

    def _name(self, space: ReachedValue, names: set[str]) -> None:
        """Code that runs has these names: those of the namespace among them may be read."""
        library = space.step == "module"
        for name in names & (space.stored.keys() - space.asked):
            space.asked.add(name)
            value = space.stored[name]
            if library:
                if isinstance(value, types.ModuleType):
                    self._note_library(f"{space.path}.{name}", value)
                elif isinstance(value, list) and all(type(each) in PLAIN for each in value):
                    self.add(f"{space.path}.{name}", space, "own", name, value)
                else:
                    self.found.append(ReachedValue(f"{space.path}.{name}", space, "library", name, value, None))
            elif not isinstance(value, types.ModuleType) or is_users(value):
                self.add(f"{space.path}.{name}", space, "own", name, value)
        for name in names & _inherited(space.value) - space.asked:
            space.asked.add(name)
            self.add(f"{space.path}.{name}", space, "own", name, MISSING)  # until a class defines it for itself

    def _follow(self, found: ReachedValue) -> None:
        """Look into a value that forward can reach."""
        value = found.value
        if type(value) in PLAIN or isinstance(value, torch.Tensor | Absence):
            return
        place = id(vars_of(value)) if isinstance(value, nn.Module) else id(value)
        if place in self.known:
            return
        self.known[place] = found
        parts = next((names for kind, names in _PARTS.items() if isinstance(value, kind)), ())
        if isinstance(value, nn.Module):
            self._follow_module(found)
        elif isinstance(value, CONTAINERS):
            self._follow_items(found)
        elif parts:
            self._follow_parts(found, *parts)
        elif isinstance(value, types.MappingProxyType):
            self.add(found.path, found, "mapping", None, step_from(value, "mapping", None))
        elif isinstance(value, weakref.ref):
            self.add(f"{found.path}()", found, "referent", None, value())
        elif isinstance(value, ContextVar):
            content = step_from(value, "context", None)
            if type(content) in PLAIN:
                self.add(f"{found.path}.get()", found, "context", None, content)
        elif isinstance(value, types.CodeType) and found.step == "item" and found.parent is not None:
            self.enter(value, found.parent.value)  # compiled from a text, which forward may evaluate
        elif is_generator(value):
            self.generators[found.path] = value, state_of(value)
        elif type(value).__name__ in ("cython_function_or_method", "_lru_cache_wrapper"):
            self._follow_wrapper(found)
        elif isinstance(value, NAMESPACES):
            self._follow_namespace(found)
        elif is_followed(value) or (isinstance(value, Enum) and is_users(type(value))):
            found.stored = _attributes(value)
            self._patch(type(value))
        if self._asks_classes:
            self._follow_class(found)
        if self._asks_names:
            self._note_names(found)

    def _follow_class(self, found: ReachedValue) -> None:
        if _is_of_users_class(found.value) and id(type(found.value)) not in self.known:
            kind = type(found.value)
            self.add(f"{kind.__module__}.{kind.__qualname__}", found, "class", None, kind)

    def _note_names(self, found: ReachedValue) -> None:
        if _is_of_users_class(found.value) or (isinstance(found.value, type) and is_users(found.value)):
            self.add(f"the names of {found.path}", found, "names", None, step_from(found.value, "names", None))

    def _follow_wrapper(self, found: ReachedValue) -> None:
        """A function of an extension, and one that keeps its results: it may have computed them before."""
        self._follow_parts(found, "__self__", "__wrapped__")
        inner = getattr(found.value, "__wrapped__", None)
        if isinstance(inner, types.FunctionType) and is_users(inner):
            self.enter(inner.__code__, inner.__globals__)

    def _follow_parts(self, found: ReachedValue, *names: str) -> None:
        for name in names:
            part = getattr(found.value, name, None)
            if part is not None and not isinstance(part, types.ModuleType):
                self.add(f"{found.path}.{name}", found, "part", name, part)

    def _follow_module(self, found: ReachedValue) -> None:
        module: nn.Module = found.value
        found.stored = dict(vars(module))
        found.hooks = [(table, dict(table)) for table in forward_hook_tables(module)]
        self.add(f"the submodules of {found.path}", found, "children", None, ", ".join(children_of(module)))
        if id(vars(module)) not in self._own:
            self._follow_state(found)
        hooks = forward_hook_functions(module)
        if hooks or id(vars(module)) not in self._own:
            self.add(f"the hooks of {found.path}", found, "hooks", None, len(hooks))
        for number, hook in enumerate(hooks):
            self.add(f"a hook of {found.path}", found, "hook", number, hook)
        for name, child in children_of(module).items():
            self.add(f"{found.path}.{name}", found, "child", name, child)

    def _follow_state(self, found: ReachedValue) -> None:
        """The mode and the tensors of a module outside of the model, which are compared nowhere else."""
        self.add(f"{found.path}.training", found, "attribute", "training", found.value.training)
        tensors = self._tensors.get(id(vars(found.value))) or tensors_of(found.value)
        for name, tensor in tensors.items():
            self.add(f"{found.path}.{name}", found, "tensor", name, tensor)

    def _follow_items(self, found: ReachedValue) -> None:
        value = found.value
        if is_users(type(value)) and type(value).__dictoffset__:
            self._note_names(found)
            self._follow_class(found)
            for name in vars_of(value):
                self.add(f"{found.path}.{name}", found, "attribute", name, attribute(value, name))
        items = items_of(value) if isinstance(value, dict) else list(enumerate(value))
        found.stored = dict(items) if isinstance(value, dict) else list(value)
        self.add(f"the size of {found.path}", found, "size", None, step_from(value, "size", None))
        is_plain = len(items) > MOST and all(map(_is_plain, items[MOST:]))
        for key, item in items[: MOST if is_plain else _MOST_OBJECTS]:
            self.add(f"{found.path}[{key!r}]", found, "item", key, item)
        if is_plain:
            self.add(f"{found.path}[{MOST}:]", found, "rest", None, step_from(value, "rest", None))

    def _follow_namespace(self, found: ReachedValue) -> None:
        value = found.value
        if not (isinstance(value, types.SimpleNamespace | threading.local) or is_users(value)):
            return
        found.stored = {name: each for name, each in vars(value).items() if name not in _BOOKKEEPING}
        self._namespaces.append(found)
        self._name(found, self._names)
        if isinstance(value, types.FunctionType):
            self._follow_function(found)
        elif isinstance(value, type):
            self._follow_parts(found, "__mro__")
            self._follow_class(found)

    def _follow_function(self, found: ReachedValue) -> None:
        function: types.FunctionType = found.value
        if "registry" in vars(function):  # of functools.singledispatch
            self.add(f"{found.path}.registry", found, "own", "registry", vars(function)["registry"])
        code = function.__code__ if is_users_file(function.__code__.co_filename) else None  # a decorator's of Python
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self.add(f"{found.path}.{name}", found, "part", name, getattr(function, name), code)
        for number, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[number]
            with contextlib.suppress(ValueError):  # empty
                content = cell.cell_contents
                if name != "__class__":
                    self.add(f"{name} in the closure of {found.path}", found, "cell", number, content, code)


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """The parameters and buffers of a module itself."""
    return {name: tensor for table in module_tables(module)[:2] for name, tensor in table.items()}


def _attributes(value: Any) -> dict[str, Any]:
    """What an object stores, in itself and in its slots."""
    slots = (name for kind in type(value).__mro__ if is_users(kind) for name in slots_of(kind))
    found = {name: attribute(value, name) for name in slots}
    return {**{name: each for name, each in found.items() if each is not MISSING}, **vars_of(value)}


def _inherited(kind: Any) -> set[str]:
    """The names that a class takes from classes of users, without defining them itself."""
    bases = kind.__mro__[1:] if isinstance(kind, type) else ()
    names = {name for base in bases if is_users(base) for name in vars(base)}
    return names - {RECORDED_BY, *vars(kind)} if names else names


def _is_of_users_class(value: Any) -> bool:
    return is_users(type(value)) and (is_followed(value) or isinstance(value, type))


def _special_methods(kind: type, codes: Mapping[int, types.CodeType]) -> Iterator[str]:
    """The names of those methods of a class that have run."""
    for name, each in vars(kind).items():
        ran = isinstance(each, types.FunctionType) and id(each.__code__) in codes
        if ran and name.startswith("__") and name != RECORDED_BY:
            yield name


def _is_plain(value: Any) -> bool:
    """Whether the text of a value says all about it."""
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def slots_of(kind: type) -> list[str]:
    """The names of the slots that a class declares."""
    return [name for name, each in vars(kind).items() if isinstance(each, types.MemberDescriptorType)]


def _is_torchs(module: nn.Module, name: str, stored: dict[str, Any]) -> bool:
    """Whether an attribute is what every module inherits, or that of a stand-in with which torch traces."""
    owner = owner_of(type(module), name)
    inherited = owner is nn.Module or getattr(owner, "__module__", "").startswith("torch.fx.experimental.")
    return inherited and name != "forward" and name not in stored
