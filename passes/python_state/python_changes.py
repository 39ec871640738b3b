"""Python changes: what forward has changed of the values that it reached. A capture puts it back and leaves nothing
behind, but what settles with a first call: a flag, a result that is looked up the next time."""

import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.python_state.executed_code import line_that_writes, only_updates
from zbcompile.passes.python_state.premises import attribute, vars_of
from zbcompile.passes.python_state.reached_values import RECORDED_BY, ReachedValue, slots_of
from zbcompile.passes.python_state.tokens import MISSING, NAMESPACES, PLAIN, token

_OPEN = (type, types.FunctionType, types.SimpleNamespace)  # namespaces to which code adds names
_HOOKS = ("register_forward_hook", "register_forward_pre_hook", "remove")
_UNJUDGED = ("tensor", "library", "module", "globals", "names")


class PythonChanges:
    """The judge of one capture. `problem` and `warning` are told of changes; `codes` are the functions that ran, by
    identity. `unsettled` says what forward has set and may not change again, but for `tensors`, attributes that each
    forward sets anew and only asks whether they are there: by what is said of them, path and name."""

    def __init__(
        self, codes: Mapping[int, types.CodeType], problem: Callable[[str], None], warning: Callable[[str], None]
    ) -> None:
        self._codes, self._problem, self._warning = codes, problem, warning
        self._kept: set[Any] = set()
        self._undo: list[tuple[ReachedValue, Any]] = []
        self._known: list[ReachedValue] = []
        self.unsettled: list[str] = []
        self.tensors: dict[str, tuple[str, str]] = {}

    def restore(self, found: Collection[ReachedValue], known: Collection[ReachedValue]) -> None:
        """Judge what forward has changed of what was `found`, and put back what it wrote into what is `known`."""
        for each in found:
            runs = each.code is None or id(each.code) in self._codes
            if runs and each.parent is not None and each.step not in _UNJUDGED and token(each.now) != each.saw:
                self._judge(each)
        self._known = _owned(known)
        for each in self._known:
            self._judge_new(each)
            self._put_back(each)
        if not self.unsettled:  # a hook is often installed together with a flag that says so
            self._put_back_hooks()

    def put_back(self, known: Collection[ReachedValue]) -> None:
        """As `restore` without a judgement: the trace has failed, and forward may be traced in another way."""
        self._known = _owned(known)
        for each in self._known:
            self._put_back(each)
        self._put_back_hooks()

    def settle(self) -> None:
        """Leave what is `unsettled` as forward has set it: torch.export puts attributes of modules back. For a tensor
        of the trace it leaves one of another shape, of which nothing but its being there may make the same graph."""
        for found, now in self._undo:
            if isinstance(now, torch.Tensor):
                now = torch.empty([size + 1 for size in now.shape], dtype=now.dtype, device="meta")
            if found.step in ("attribute", "own") and found.parent is not None:
                _store(found.parent.value, vars_of(found.parent.value), found.key, now)

    def undo(self) -> None:
        """Put back what was left `unsettled`, too."""
        self._kept.clear()
        for each, _ in self._undo:
            if each.parent is not None and each.parent.stored is not None:
                self._put_back(each.parent)
        self._put_back_hooks()

    def forget_tensors(self) -> None:
        """Put back `tensors`, which no step sets."""
        self.undo()
        for path, name in self.tensors.values():
            self._warn_of_change(path, name)

    def _put_back_hooks(self) -> None:
        for table, before in (pair for each in self._known for pair in each.hooks):
            if list(table) != list(before):
                table.clear()
                table.update(before)

    def _judge_new(self, found: ReachedValue) -> None:
        """Judge what was never noted as read: the mode of a module, and what a namespace did not have before."""
        value, stored = found.value, found.stored
        if isinstance(value, nn.Module) and value.training is not stored["training"]:
            self._judge(
                ReachedValue(f"{found.path}.training", found, "attribute", "training", stored["training"], None)
            )
        elif isinstance(value, _OPEN):
            for name in filter(self._is_named, vars(value).keys() - stored.keys()):
                self._judge(ReachedValue(f"{found.path}.{name}", found, "own", name, MISSING, MISSING))

    def _is_named(self, name: str) -> bool:
        """Whether code that ran has this name."""
        return name != RECORDED_BY and any(name in code.co_names for code in self._codes.values())

    def _judge(self, found: ReachedValue) -> None:
        parent, named = found.parent, _named(found)
        name, codes = _name_of(named), list(self._codes.values())
        if name and name != "training" and only_updates(codes, name):
            self._warn_of_change(named.path, name)
            return
        lines = (line_that_writes(codes, each) for each in (_HOOKS if found.step == "hooks" else (name,)))
        problem = Refusal.PYTHON_CHANGE.text(path=named.path, line=next(filter(None, lines), ""))
        settles = not (_has_tensor(found.now) or _has_tensor(found.value))
        if (
            found.step == "attribute"
            and isinstance(found.now, torch.Tensor)
            and all(type(size) is int for size in found.now.shape)
        ):
            settles, self.tensors[problem] = True, (named.path, name)
        if parent is not None and (settles or (found.step == "size" and _remembers(parent))):
            self.unsettled.append(problem)
            self._undo.append((found, found.now))
            self._kept.add((id(parent), str(found.key)) if found.step != "size" else id(parent))
        else:
            self._problem(problem)

    def _put_back(self, found: ReachedValue) -> None:
        """Undo what was written into an object."""
        value, stored = found.value, found.stored
        if id(found) in self._kept:
            return
        if isinstance(stored, list):
            if isinstance(value, list | deque) and [*map(id, value)] != [*map(id, stored)]:
                value.clear()
                value.extend(stored)
            return
        part = found.step == "globals" or isinstance(value, NAMESPACES)
        own = value if isinstance(value, dict) else vars(value) if isinstance(value, _OPEN) else vars_of(value)
        for name in stored.keys() & found.asked if part else stored:
            now = own[name] if name in own else attribute(value, name) if not isinstance(value, dict) else MISSING
            if not _is_same(now, stored[name]) and (id(found), str(name)) not in self._kept:
                self._note_write(found, name, stored[name])
                _store(value, own, name, stored[name])
        for name in () if part and not isinstance(value, _OPEN) else set(own) - stored.keys():
            if (id(found), str(name)) not in self._kept and (not part or self._is_named(name)):
                _store(value, own, name, MISSING)

    def _note_write(self, found: ReachedValue, name: str, old: Any) -> None:
        if name not in found.asked and type(old) in PLAIN and isinstance(found.value, nn.Module):
            self._warn_of_change(f"{found.path}.{name}", name)

    def _warn_of_change(self, path: str, name: str) -> None:
        line = line_that_writes(self._codes.values(), name)
        self._warning(
            f"forward changes {path} ({line}), for others to read; a compiled step runs no Python, and never does it."
        )


def _owned(known: Collection[ReachedValue]) -> list[ReachedValue]:
    """What has something written in it that can be put back: not what belongs to libraries."""
    return [each for each in known if each.stored is not None and each.step != "module"]


def _remembers(found: ReachedValue) -> bool:
    """Whether a mapping has got more entries, none of them a tensor: results that are looked up next time."""
    value, before = found.value, found.stored
    if not isinstance(value, dict) or any(value.get(key, MISSING) is not each for key, each in before.items()):
        return False
    return not any(isinstance(each, torch.Tensor) for key, each in value.items() if key not in before)


def _has_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
    return any(isinstance(each, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) for each in items)


def _named(found: ReachedValue) -> ReachedValue:
    """The nearest value around this one that code can have a name for."""
    while found.step in ("item", "size", "rest") and found.parent is not None and found.parent.step != "globals":
        found = found.parent
    return found


def _name_of(found: ReachedValue) -> str:
    """The name by which code knows a value; "" if it has none, as the default of an argument."""
    if found.step == "cell" and found.parent is not None:
        return str(found.parent.value.__code__.co_freevars[found.key])
    return "" if found.step in ("part", "children", "names", "hooks") else str(found.key)


def _is_same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or an equal plain value: a C object makes a new one for each read. Texts tell 0.0
    from -0.0, and a NaN from nothing but other values."""
    return now is before or (type(now) is type(before) and type(now) in PLAIN and repr(now) == repr(before))


def _store(value: Any, own: dict[str, Any], name: str, old: Any) -> None:
    if isinstance(value, type):
        delattr(value, name) if old is MISSING else setattr(value, name, old)
    elif old is MISSING:
        own.pop(name, None)
    elif isinstance(value, dict) or name in own or not any(name in slots_of(each) for each in type(value).__mro__):
        own[name] = old
    else:
        object.__setattr__(value, name, old)
