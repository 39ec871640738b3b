"""Numbers that a trace leaves open: those that forward reads out of tensors for logging, say.

They have no value in a trace, so that nothing may depend on them: a question that fails must not go unnoticed if
forward catches the error, and their type must be eager's.
"""

import builtins
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.torch_private import DATA_DEPENDENT_ERRORS, replaced, told_of_calls

_EAGERS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_TRACERS = ("torch", "zbcompile")  # code that can handle open numbers
_READ = torch.ops.aten.item.default


@contextlib.contextmanager
def failed_questions(note: Callable[[], None]) -> Iterator[None]:
    """Inside, call `note` for every question about an open number, even if its error is caught."""
    places: list[tuple[type, str]] = [(error, "__init__") for error in DATA_DEPENDENT_ERRORS]
    places.append((torch.SymInt, "__hash__"))
    with contextlib.ExitStack() as stack:
        for kind, name in places:
            stack.enter_context(told_of_calls(kind, name, note))
        yield


def with_eagers_types() -> contextlib.AbstractContextManager[None]:
    """Inside, `isinstance` takes an open number for what it is in eager mode, unless torch asks. The builtin itself
    must be replaced: `__class__`, by which an object passes for another's, cannot be given to a class that exists."""
    truth = builtins.isinstance

    def answer(value: Any, kinds: Any) -> bool:
        is_open = type(value) in _EAGERS and asker().partition(".")[0] not in _TRACERS
        return truth(_EAGERS[type(value)] if is_open else value, kinds)

    return replaced(builtins, "isinstance", answer)


def asker() -> str:
    """The module of the code that asks, two frames up."""
    frame = inspect.currentframe()
    try:
        return str(frame.f_back.f_back.f_globals.get("__name__"))  # type: ignore[union-attr]
    finally:
        del frame  # a frame that holds itself would keep the fake tensors of all frames above it


def computes_with_them(graph: Graph) -> bool:
    """Whether an operation of a traced graph makes a tensor from an open number."""
    derived: set[Node] = set()
    for node in graph.nodes:
        if node.target is not _READ and derived.isdisjoint(node.all_input_nodes):
            continue
        if isinstance(node.meta.get("val"), torch.Tensor):
            return True
        derived.add(node)
    return False
