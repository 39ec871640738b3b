"""Python reads: what forward and loss read beside their inputs while a trace runs them, and what they leave changed.

Attributes of modules, and of a user's own objects, are seen as they are read. Globals and variables of closures count
if a function that names them ran; so do attributes of what tells nobody that it is read (a Python module, a class, a
namespace). A value counts if it stood there before forward began: what forward writes first, and reads then, it makes
itself.
"""

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zbcompile.passes.capture.python_effects import state_of
from zbcompile.passes.torch_private import (
    children_of,
    forward_hook_functions,
    module_tables,
    replaced,
    replaced_attribute,
)
from zbcompile.passes.values.executed_code import FunctionWatch, globals_read, line_that_writes, only_updates
from zbcompile.passes.values.premises import (
    CONTAINERS,
    MISSING,
    MOST,
    PLAIN,
    Missing,
    Premises,
    Read,
    attribute,
    is_followed,
    is_generator,
    is_users,
    owner_of,
    step_from,
    token,
    vars_of,
)

_TABLES = frozenset(vars(nn.Module()))  # modes, hooks and tensors, which others compare
_NAMESPACES = (types.ModuleType, type, types.SimpleNamespace, types.FunctionType)


@dataclass(eq=False)
class _Seen:
    """A value that forward can reach. `stored` is what it held when it was found, `asked` the names read since; `code`
    that of the function whose closure it is in."""

    path: str
    parent: "_Seen | None"
    step: str
    key: Any
    value: Any
    saw: Any
    code: types.CodeType | None = None
    stored: Any = None
    asked: set[str] = field(default_factory=set)

    @property
    def now(self) -> Any:
        return self.value if self.parent is None else step_from(self.parent.value, self.step, self.key)


@dataclass(frozen=True)
class Roots:
    """The model and the loss, and the tensors of the loss if that is a module, by the identity of each module's
    attributes: inside of an export other ones stand in their places."""

    model: nn.Module
    loss: Any
    tensors: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, model: nn.Module, loss: Any) -> "Roots":
        loss = None if isinstance(loss, Missing) else loss
        modules = loss.modules() if isinstance(loss, nn.Module) else ()
        return cls(model, loss, {id(vars(each)): _tensors_of(each) for each in modules})


def _tensors_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor for table in module_tables(module)[:2] for name, tensor in table.items()}


class PythonReads:
    """What one trace reads of a model and its loss. `problem` and `warning` are told of what forward changes."""

    def __init__(self, roots: Roots, problem: Callable[[str], None], warning: Callable[[str], None]) -> None:
        self._problem, self._warning = problem, warning
        self.functions = FunctionWatch(self._entered)
        self.generators: dict[str, tuple[Any, Any]] = {}  # with their states when they were found
        self._found: list[_Seen] = []
        self._known: dict[int, _Seen] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        self._namespaces: list[_Seen] = []
        self._names: set[str] = set()
        self._patched: set[type] = set()
        self._patches = contextlib.ExitStack()
        self._roots = roots
        self._own = {id(vars(module)) for module in roots.model.modules()}
        self._kept: set[Any] = set()
        self._undo: list[tuple[_Seen, Any]] = []
        self._has_compiled = False
        self.unsettled: list[str] = []  # what forward has set, and may not change again

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around forward and loss."""
        with replaced(torch, "compile", functools.partial(self._compile, torch.compile)), self._patches:
            self._patch(nn.Module)
            self._add("model", None, "root", "model", self._roots.model)
            if self._roots.loss is not None:
                self._add("loss", None, "root", "loss", self._roots.loss)
            with self.functions.watching():
                yield
        self._restore()

    def premises(self) -> Premises:
        """What was read. Values of closures count if their function ran."""
        if self._has_compiled:
            self._note_untold()
        kept: dict[int, int] = {}
        reads: list[Read] = []
        for each in self._found:
            runs = each.code is None or id(each.code) in self.functions.codes
            if not runs or (each.parent is not None and id(each.parent) not in kept):
                continue
            kept[id(each)] = len(reads)
            parent = -1 if each.parent is None else kept[id(each.parent)]
            reads.append(Read(each.path, parent, each.step, each.key, each.saw))
        return Premises(tuple(reads), self._globals)

    def _compile(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch.compile, for whatever torch runs so inside of forward; it must not see what records."""
        made = original(function, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            kinds, self._has_compiled = list(self._patched), True
            with self.functions.pause():
                self._patches.close()
                try:
                    return made(*args, **kwargs)
                finally:
                    self._patched.clear()
                    for kind in kinds:
                        self._patch(kind)

        return run

    def _note_untold(self) -> None:
        """Code was traced in another way, by its bytes (torch.cond): nothing has told what it reads, so that all
        attributes of modules count, and what functions inside of the others name."""
        for each in [each for each in self._known.values() if isinstance(each.value, nn.Module)]:
            for name in each.stored.keys() - _TABLES:
                self._read(each.value, name)
        for space in [each for each in self._found if each.step == "globals"]:
            for code in list(self.functions.codes.values()):
                for inner in filter(_is_code, code.co_consts):
                    self._read_globals(space.value, globals_read(inner) & space.value.keys())

    def _patch(self, kind: type) -> None:
        """See what is read of instances of a class from now on."""
        if kind in self._patched or (issubclass(kind, nn.Module) and kind is not nn.Module):
            return
        self._patched.add(kind)
        original: Any = kind.__getattribute__

        def seen(value: Any, name: str) -> Any:
            self._read(value, name)
            return original(value, name)

        with contextlib.suppress(TypeError):  # a class of an extension: its instances are known by identity
            self._patches.enter_context(replaced_attribute(kind, "__getattribute__", seen))

    def _read(self, value: Any, name: str) -> None:
        if name.startswith("__"):
            return
        own = vars_of(value)
        found = self._known.get(id(own)) or self._known.get(id(value))
        if found is None or name in found.asked:
            return
        found.asked.add(name)
        if isinstance(value, nn.Module) and (name in _TABLES or _is_torchs(value, name, found.stored)):
            return
        before = found.stored.get(name, MISSING)
        if before is not MISSING:
            if own.get(name, before) is before:
                self._add(f"{found.path}.{name}", found, "attribute", name, before)
        elif name not in own and not self._is_tensor_or_child(value, name):
            self._add(f"{found.path}.{name}", found, "attribute", name, attribute(value, name))

    def _is_tensor_or_child(self, value: Any, name: str) -> bool:
        return any(table.get(name) is not None for table in module_tables(value))

    def _add(self, path: str, parent: _Seen | None, step: str, key: Any, value: Any, code: Any = None) -> _Seen:
        found = _Seen(path, parent, step, key, value, token(value), code)
        self._found.append(found)
        self._follow(found)
        return found

    def _follow(self, found: _Seen) -> None:
        """Look into a value that forward can reach."""
        value = found.value
        if type(value) in PLAIN or isinstance(value, torch.Tensor | Missing):
            return
        place = id(vars_of(value)) if isinstance(value, nn.Module) else id(value)
        if place in self._known:
            return
        self._known[place] = found
        if isinstance(value, nn.Module):
            self._follow_module(found)
        elif isinstance(value, CONTAINERS):
            self._follow_items(found)
        elif isinstance(value, functools.partial):
            self._parts(found, "func", "args", "keywords")
        elif isinstance(value, types.MethodType):
            self._parts(found, "__self__", "__func__")
        elif is_generator(value):
            self.generators[found.path] = value, state_of(value)
        elif isinstance(value, types.BuiltinMethodType) or type(value).__name__ == "cython_function_or_method":
            self._parts(found, "__self__")
        elif isinstance(value, property):
            self._parts(found, "fget")
        elif isinstance(value, staticmethod | classmethod):
            self._parts(found, "__func__")
        elif isinstance(value, _NAMESPACES):
            self._follow_namespace(found)
        elif is_followed(value):
            found.stored = _attributes(value)
            self._patch(type(value))

    def _parts(self, found: _Seen, *names: str) -> None:
        for name in names:
            part = getattr(found.value, name, None)
            if part is not None and not isinstance(part, types.ModuleType):
                self._add(f"{found.path}.{name}", found, "part", name, part)

    def _follow_module(self, found: _Seen) -> None:
        module: nn.Module = found.value
        found.stored = dict(vars(module))
        self._add(f"the submodules of {found.path}", found, "children", None, ", ".join(children_of(module)))
        if id(vars(module)) not in self._own:
            self._follow_state(found)
        for number, hook in enumerate(forward_hook_functions(module)):
            self._add(f"a hook of {found.path}", found, "hook", number, hook)
        for name, child in children_of(module).items():
            self._add(f"{found.path}.{name}", found, "child", name, child)

    def _follow_state(self, found: _Seen) -> None:
        """The mode and the tensors of a module outside of the model, which nobody else compares."""
        self._add(f"{found.path}.training", found, "attribute", "training", found.value.training)
        tensors = self._roots.tensors.get(id(vars(found.value))) or _tensors_of(found.value)
        for name, tensor in tensors.items():
            self._add(f"{found.path}.{name}", found, "tensor", name, tensor)

    def _follow_items(self, found: _Seen) -> None:
        value = found.value
        # no code of a subclass runs: some mappings import what they are asked for
        found.stored = dict(dict.items(value)) if isinstance(value, dict) else list(value)
        size = step_from(value, "size", None)
        self._add(f"the size of {found.path}", found, "size", None, size)
        items = found.stored.items() if isinstance(value, dict) else enumerate(found.stored)
        for key, item in list(items)[:MOST]:
            self._add(f"{found.path}[{key!r}]", found, "item", key, item)

    def _follow_namespace(self, found: _Seen) -> None:
        value = found.value
        simple = isinstance(value, types.SimpleNamespace)
        if not simple and not is_users(value):
            return
        found.stored = dict(vars(value))
        self._namespaces.append(found)
        self._name(found, self._names)
        if isinstance(value, types.FunctionType):
            self._follow_function(found)

    def _follow_function(self, found: _Seen) -> None:
        function: types.FunctionType = found.value
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._add(f"{found.path}.{name}", found, "part", name, getattr(function, name), function.__code__)
        for number, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[number]
            with contextlib.suppress(ValueError):  # empty
                content = cell.cell_contents
                if name != "__class__":
                    path = f"{name} in the closure of {found.path}"
                    self._add(path, found, "cell", number, content, function.__code__)

    def _entered(self, frame: types.FrameType) -> None:
        """A function begins: what it can name."""
        code = frame.f_code
        new = set(code.co_names) - self._names
        self._names |= new
        for each in list(self._namespaces):
            self._name(each, new)
        self._read_globals(frame.f_globals, globals_read(code))

    def _read_globals(self, space: dict[str, Any], names: frozenset[str]) -> None:
        key = str(space.get("__name__"))
        root = self._known.get(id(space))
        if root is None:
            if vars(sys.modules.get(key, types)) is not space:
                self._globals[key] = space
            root = self._known[id(space)] = _Seen(key, None, "globals", key, space, None, stored={})
            self._found.append(root)
        for name in names - root.asked:
            root.asked.add(name)
            value = space.get(name, MISSING)
            if value is MISSING or (isinstance(value, types.ModuleType) and not is_users(value)):
                continue
            root.stored[name] = value
            self._add(f"{key}.{name}", root, "item", name, value)

    def _name(self, space: _Seen, names: set[str]) -> None:
        """Code that runs has these names: those of the namespace among them may be read."""
        for name in names & (space.stored.keys() - space.asked):
            space.asked.add(name)
            value = space.stored[name]
            if not isinstance(value, types.ModuleType) or is_users(value):
                self._add(f"{space.path}.{name}", space, "own", name, value)

    def _restore(self) -> None:
        """Judge what forward has changed, and put it back: a capture leaves nothing behind."""
        for each in self._found:
            runs = each.code is None or id(each.code) in self.functions.codes
            if runs and each.parent is not None and each.step != "tensor" and token(each.now) != each.saw:
                self._judge(each)
        for each in self._known.values():
            if each.stored is not None:
                self._put_back(each)

    def settle(self) -> None:
        """Leave what is `unsettled` as forward has set it: torch.export puts attributes of modules back."""
        for found, now in self._undo:
            if found.step == "attribute" and found.parent is not None:
                _store(found.parent.value, vars_of(found.parent.value), found.key, now)

    def undo(self) -> None:
        """Put back what was left `unsettled`, too."""
        self._kept.clear()
        for each, _ in self._undo:
            if each.parent is not None and each.parent.stored is not None:
                self._put_back(each.parent)

    def _judge(self, found: _Seen) -> None:
        parent = found.parent
        inside = found.step in ("item", "size") and parent is not None and parent.step != "globals"
        named = parent if inside and parent is not None else found
        name, codes = _name_of(named), list(self.functions.codes.values())
        if only_updates(codes, name):
            self._warn_of_change(named.path, name)
            return
        problem = (
            f"forward changes {named.path} ({line_that_writes(codes, name)}) and reads it; every microbatch would "
            "compute with the value that it had at capture. Register it with register_buffer, or pass it as an input; "
            "if it settles after a first call, call the model once before compiling."
        )
        settles = not (_has_tensor(found.now) or _has_tensor(found.value))
        if parent is not None and (settles or (found.step == "size" and _remembers(parent))):
            self.unsettled.append(problem)
            self._undo.append((found, found.now))
            self._kept.add((id(parent), str(found.key)) if found.step != "size" else id(parent))
        else:
            self._problem(problem)

    def _put_back(self, found: _Seen) -> None:
        """Undo what was written into an object."""
        value, stored = found.value, found.stored
        if id(found) in self._kept:
            return
        if isinstance(stored, list):
            if isinstance(value, list | deque) and not _is_same(list(value), stored):
                value.clear()
                value.extend(stored)
            return
        part = found.step == "globals" or isinstance(value, _NAMESPACES)
        own = value if isinstance(value, dict) else vars_of(value)
        for name in stored.keys() & found.asked if part else stored:
            now = own[name] if name in own else attribute(value, name) if not isinstance(value, dict) else MISSING
            if now is not stored[name] and (id(found), str(name)) not in self._kept:
                self._note_write(found, name, stored[name])
                _store(value, own, name, stored[name])
        for name in () if part else own.keys() - stored.keys():
            if (id(found), str(name)) not in self._kept:
                del own[name]

    def _note_write(self, found: _Seen, name: str, old: Any) -> None:
        if name not in found.asked and type(old) in PLAIN and isinstance(found.value, nn.Module):
            self._warn_of_change(f"{found.path}.{name}", name)

    def _warn_of_change(self, path: str, name: str) -> None:
        line = line_that_writes(self.functions.codes.values(), name)
        self._warning(
            f"forward changes {path} ({line}), for others to read; a compiled step runs no Python, and never does it."
        )


def _remembers(found: _Seen) -> bool:
    """Whether a mapping has got more entries, none of them a tensor: results that are looked up next time."""
    value, before = found.value, found.stored
    if not isinstance(value, dict) or any(value.get(key, MISSING) is not each for key, each in before.items()):
        return False
    return not any(isinstance(each, torch.Tensor) for key, each in value.items() if key not in before)


def _has_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
    return any(isinstance(each, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) for each in items)


def _is_code(value: Any) -> bool:
    return isinstance(value, types.CodeType)


def _name_of(found: _Seen) -> str:
    """The name by which code knows a value."""
    if found.step == "cell" and found.parent is not None:
        return str(found.parent.value.__code__.co_freevars[found.key])
    if found.step == "part" and found.parent is not None and found.key.endswith("defaults__"):
        return found.key
    return str(found.key)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object stores, in itself and in its slots."""
    slots = (name for kind in type(value).__mro__ if is_users(kind) for name in _slots(kind))
    found = {name: attribute(value, name) for name in slots}
    return {**{name: each for name, each in found.items() if each is not MISSING}, **vars_of(value)}


def _slots(kind: type) -> list[str]:
    return [name for name, each in vars(kind).items() if isinstance(each, types.MemberDescriptorType)]


def _is_torchs(module: nn.Module, name: str, stored: dict[str, Any]) -> bool:
    """Whether an attribute is what every module inherits."""
    return name != "forward" and name not in stored and owner_of(type(module), name) is nn.Module


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _store(value: Any, own: dict[str, Any], name: str, old: Any) -> None:
    if isinstance(value, type):
        setattr(value, name, old)
    elif isinstance(value, dict) or name in own or not _is_slot(type(value), name):
        own[name] = old
    else:
        object.__setattr__(value, name, old)


def _is_slot(kind: type, name: str) -> bool:
    return any(name in _slots(each) for each in kind.__mro__ if is_users(each))
