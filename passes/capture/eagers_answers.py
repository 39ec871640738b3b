"""Eager's answers: what a trace tells a model that asks for more than tensors, so that it takes the path of eager mode.

Many models take another path if torch says that it traces. transformers' decoders then build the causal mask and repeat
keys and values themselves instead of leaving both to the attention kernel: other kernels, other bits, more memory.

Numbers that forward reads out of tensors, for logging say, may be left open. They have no value in a trace, so nothing
may depend on them: a question that fails must not go unnoticed if forward catches the error, and their type must be
eager's.
"""

import builtins
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensor,
    NoTensor,
    asked_for_fake_tensors,
    replaced,
    replaced_attribute,
    told_of_calls,
)

_EAGERS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_TRACERS = ("torch", "zbcompile")  # code that can handle open numbers
_READ = torch.ops.aten.item.default


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` return False to all code but torch's own, and no
    tensor is an instance of `torch._subclasses.FakeTensor`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(asked_for_fake_tensors(_answer(lambda: FakeTensor, NoTensor)))
        for question in ("is_compiling", "is_exporting"):
            answer = _answer(getattr(torch.compiler, question), False)
            stack.enter_context(replaced(torch.compiler, question, answer))
        yield


def _answer(truth: Callable[[], Any], eagers: Any) -> Callable[..., Any]:
    return lambda *_: truth() if _asker().partition(".")[0] == "torch" else eagers


@contextlib.contextmanager
def failed_questions(note: Callable[[], None]) -> Iterator[None]:
    """Inside, call `note` for every question about an open number, even if its error is caught."""
    places: list[tuple[type, str]] = [(error, "__init__") for error in DATA_DEPENDENT_ERRORS]
    places.append((torch.SymInt, "__hash__"))
    with contextlib.ExitStack() as stack:
        for kind, name in places:
            stack.enter_context(told_of_calls(kind, name, note))
        yield


@contextlib.contextmanager
def with_eagers_types() -> Iterator[None]:
    """Inside, an open number can be written in any format (as its name), and `isinstance` takes it for what it is in
    eager mode, unless torch asks. The builtin itself must be replaced: `__class__`, by which an object passes for
    another's, cannot be given to a class that exists."""
    truth = builtins.isinstance

    def answer(value: Any, kinds: Any) -> bool:
        is_open = type(value) in _EAGERS and _asker().partition(".")[0] not in _TRACERS
        return truth(_EAGERS[type(value)] if is_open else value, kinds)

    with contextlib.ExitStack() as stack:
        for kind in _EAGERS:
            stack.enter_context(replaced_attribute(kind, "__format__", lambda number, _: str(number)))
        stack.enter_context(replaced(builtins, "isinstance", answer))
        yield


def _asker() -> str:
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
