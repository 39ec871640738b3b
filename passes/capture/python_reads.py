"""Python reads: what forward and loss read besides their inputs while a trace runs them, and what they leave changed.

Attributes of modules, and of a user's own objects, are seen as they are read. Globals and variables of closures count
if a function that names them ran; so do attributes whose reads cannot be observed (of a Python module, a class, a
namespace). A value counts if it stood there before forward began: what forward writes first, and reads then, it makes
itself.
"""

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zbcompile.passes.python_state.executed_code import FunctionWatch, is_users_name, names_in
from zbcompile.passes.python_state.premises import Premises, ValueRead
from zbcompile.passes.python_state.python_changes import PythonChanges
from zbcompile.passes.python_state.reached_values import TABLES, Reach, ReachedValue, tensors_of
from zbcompile.passes.python_state.tokens import Absence, token
from zbcompile.passes.torch_private import replaced, replaced_attribute


@dataclass(frozen=True)
class Roots:
    """The model and the loss, and the tensors of the loss if that is a module, by the identity of each module's
    attributes: inside of an export others take their places."""

    model: nn.Module
    loss: Any
    tensors: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, model: nn.Module, loss: Any) -> "Roots":
        loss = None if isinstance(loss, Absence) else loss
        modules = loss.modules() if isinstance(loss, nn.Module) else ()
        return cls(model, loss, {id(vars(each)): tensors_of(each) for each in modules})


class PythonReads:
    """What one trace reads of a model and its loss; `changes` judges what forward changes, and tells `problem` and
    `warning`."""

    def __init__(self, roots: Roots, problem: Callable[[str], None], warning: Callable[[str], None]) -> None:
        self._roots = roots
        own = frozenset(id(vars(module)) for module in roots.model.modules())
        self._reach = Reach(own, roots.tensors, self._patch)
        self.functions = FunctionWatch(lambda frame: self._reach.enter(frame.f_code, frame.f_globals))
        self.changes = PythonChanges(self.functions.codes, problem, warning)
        self._patched: set[type] = set()
        self._patches = contextlib.ExitStack()
        self._has_compiled = False

    @property
    def generators(self) -> Mapping[str, tuple[Any, Any]]:
        """The generators that forward can reach, by path, each with its state when it was found."""
        return self._reach.generators

    def read_trained(self, parameter: torch.Tensor, now: bool) -> None:
        """Forward asks whether a parameter of the model trains, which is no part of what tells evaluations apart."""
        self._reach.read_trained(parameter, now)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around forward and loss."""
        copying = contextlib.ExitStack()
        for name in ("copy", "deepcopy"):
            copying.enter_context(replaced(copy, name, self._copying(getattr(copy, name))))
        try:
            with replaced(torch, "compile", functools.partial(self._compile, torch.compile)), copying, self._patches:
                self._patch(nn.Module)
                self._reach.add("model", None, "root", "model", self._roots.model)
                if self._roots.loss is not None:
                    self._reach.add("loss", None, "root", "loss", self._roots.loss)
                with self.functions.watching():
                    yield
        except Exception:
            self.changes.put_back(self._reach.known.values())
            raise
        self.changes.restore(self._reach.found, self._reach.known.values())

    def premises(self) -> Premises:
        """What was read. Values of closures count if their function ran. What belongs to libraries is looked at now:
        while a trace runs, others take their places."""
        if self._has_compiled:
            self._note_untold()
        self._reach.note_special_methods(self.functions.codes)
        kept: dict[int, int] = {}
        reads: list[ValueRead] = []
        for each in self._reach.found:
            runs = each.code is None or id(each.code) in self.functions.codes
            if not runs or (each.parent is not None and id(each.parent) not in kept):
                continue
            kept[id(each)] = len(reads)
            parent = -1 if each.parent is None else kept[id(each.parent)]
            saw = token(each.now) if each.step == "library" else each.saw
            reads.append(ValueRead(each.path, parent, each.step, each.key, saw))
        return Premises(tuple(reads), self._reach.globals)

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

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """As copy.copy, which reads what an object stores without asking for its attributes."""

        def copied(value: Any, *memo: Any) -> Any:
            self._reach.read_stored(value)
            return original(value, *memo)

        return copied

    def _note_untold(self) -> None:
        """Note that code was traced by its bytecode (torch.cond), so that nothing reports what it reads: then all
        attributes of modules count, and whatever functions name that are defined inside others."""
        modules: list[ReachedValue] = [each for each in self._reach.known.values() if isinstance(each.value, nn.Module)]
        for each in modules:
            for name in each.stored.keys() - TABLES:
                self._reach.read(each.value, name)
        for space in [each for each in self._reach.found if each.step == "globals"]:
            for code in list(self.functions.codes.values()):
                for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
                    self._reach.read_globals(space.value, set(names_in(inner) & space.value.keys()))

    def _patch(self, kind: type) -> None:
        """See what is read of instances of a class from now on."""
        if kind in self._patched or (issubclass(kind, nn.Module) and kind is not nn.Module):
            return
        self._patched.add(kind)
        original: Any = kind.__getattribute__

        def seen(value: Any, name: str) -> Any:
            if not name.startswith("__"):
                self._reach.read(value, name)
            elif name == "__dict__" and _is_asked_by_user(inspect.currentframe()):
                self._reach.read_all(value)
            return original(value, name)

        with contextlib.suppress(TypeError):  # a class of an extension: its instances are known by identity
            self._patches.enter_context(replaced_attribute(kind, "__getattribute__", seen))


def _is_asked_by_user(frame: types.FrameType | None) -> bool:
    """Whether the function of this frame was called by code of a user; torch's modules ask for all attributes, too."""
    return frame is not None and frame.f_back is not None and is_users_name(frame.f_back.f_globals.get("__name__"))
