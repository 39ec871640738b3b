"""Eager's answers: what a trace tells a model that asks for more than tensors, so that it takes the path of eager mode.

Many models take another path if torch says that it traces. transformers' decoders then build the causal mask and repeat
keys and values themselves instead of leaving both to the attention kernel: other kernels, other bits, more memory.

A *report* only measures tensors and tells somebody, behind `if not torch.compiler.is_compiling():`. A trace has none of
the values that it asks for; a model that cannot be captured for that reason is traced once more without its reports.
Which code is a report is decided by its statements: all that they call is known to change nothing.

Numbers that forward reads out of tensors, for logging say, may be left open. They have no value in a trace, so nothing
may depend on them: a question that fails must not go unnoticed if forward catches the error, and their type must be
eager's.
"""

import ast
import builtins
import contextlib
import dis
import inspect
import linecache
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from zbcompile.passes.graph.source_location import is_users
from zbcompile.passes.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensor,
    NoTensor,
    asked_for_fake_tensors,
    replaced,
    replaced_attribute,
    told_of_calls,
)

MISSING = object()
OPEN_NUMBERS = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}  # each with one of eager's type
_TRACERS = ("torch", "zbcompile")  # code that can handle open numbers
_CONVERSIONS = {"__float__": math.nan, "__int__": 0, "__index__": 0}
_TELLS = re.compile("print|warn|(debug|info|warning)(_once)?|error|critical|exception|log|write|flush|add_scalars?")
_MEASURES = re.compile(
    "abs|all|amax|amin|any|argmax|argmin|bool|clone|count_nonzero|cpu|detach|dict|dim|double|enumerate|exp|float|format|"
    "getattr|hasattr|int|isfinite|isinf|isinstance|isnan|items?|join|keys|len|list|log|log10|max|mean|median|min|"
    "named_(buffers|parameters)|no_grad|norm|numel|numpy|parameters|quantile|range|repr|reshape|round|set|size|sorted|"
    "sqrt|square|std|str|sum|tolist|tuple|type|values|var|vector_norm|zip"
)
_STATEMENTS = (ast.Assign, ast.Expr, ast.For, ast.If, ast.Pass, ast.With)
_OTHER_CODE = (ast.Await, ast.Lambda, ast.NamedExpr, ast.Yield, ast.YieldFrom)


class _Report(NamedTuple):
    """The attributes that a report sets, and what it calls."""

    sets: frozenset[str]
    calls: tuple[ast.Call, ...]


@contextlib.contextmanager
def untraced(leaves_out: Callable[[frozenset[str]], bool]) -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` return False to all code but torch's own, and no
    tensor is an instance of `torch._subclasses.FakeTensor`. Where a report stands behind the question, `leaves_out`
    gets the attributes that it sets, and answers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(asked_for_fake_tensors(_answer(lambda: FakeTensor, lambda _: NoTensor)))
        for question in ("is_compiling", "is_exporting"):
            answer = _answer(getattr(torch.compiler, question), partial(_eagers_answer, leaves_out))
            stack.enter_context(replaced(torch.compiler, question, answer))
        yield


def _answer(truth: Callable[[], Any], eagers: Callable[[FrameType | None], Any]) -> Callable[..., Any]:
    return lambda *_: truth() if _asker().partition(".")[0] == "torch" else eagers(inspect.currentframe())


def _eagers_answer(leaves_out: Callable[[frozenset[str]], bool], inner: Any) -> bool:
    asker: FrameType = inner.f_back
    place = list(asker.f_code.co_positions())[asker.f_lasti // 2]
    report = _reports("".join(linecache.getlines(asker.f_code.co_filename, asker.f_globals))).get(place)
    return report is not None and not any(_may_act(each, asker) for each in report.calls) and leaves_out(report.sets)


def _may_act(call: ast.Call, frame: FrameType) -> bool:
    """Whether a call in a report may run code of a user or a module, which may do anything, whatever its name is. A
    method of something computed measures, if it is given constants alone."""
    *_, owner, found = None, *_values(call.func, frame)
    if found is MISSING:
        of_constants = all(isinstance(each, ast.Constant | ast.UnaryOp) for each in call.args)
        return not of_constants or _TELLS.fullmatch(_last_name(call.func)) is not None
    screens = {id(sys.stdout), id(sys.stderr)}  # notebooks and tests have files of their own in these places
    is_telling = isinstance(owner, logging.Logger) or screens & {id(owner), id(found)}
    return isinstance(found, torch.nn.Module) or (is_users(found) and not is_telling)


def _values(node: ast.expr, frame: FrameType) -> list[Any]:
    """What a frame has for a name and the attributes of it, one by one; last MISSING for what is computed."""
    if isinstance(node, ast.Name):
        spaces = (frame.f_locals, frame.f_globals, frame.f_builtins)
        return [next((space[node.id] for space in spaces if node.id in space), MISSING)]
    if not isinstance(node, ast.Attribute):
        return [node.value if isinstance(node, ast.Constant) else MISSING]
    values = _values(node.value, frame)
    is_known = values[-1] is not MISSING and not isinstance(values[-1], torch.Tensor)
    return [*values, getattr(values[-1], node.attr, MISSING) if is_known else values[-1]]


@lru_cache(maxsize=16)  # every layer asks again
def _reports(source: str) -> dict[tuple[int | None, ...], _Report]:
    """The reports of a file by the place of the call that asks: line, last line, columns."""
    try:
        functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    except SyntaxError:  # the file has been edited
        return {}
    found: dict[tuple[int | None, ...], _Report | None] = {}
    for function in functions:  # inner ones come later
        for call, statements in _behind_questions(function):
            inside = [node for each in statements for node in ast.walk(each)]
            names, attributes = _stored(inside, ast.Name), _stored(inside, ast.Attribute)
            is_report = not any(map(_acts, inside)) and names.isdisjoint(_other_names(function, inside))
            calls = tuple(each for node in inside for each in _called(node))
            place = call.lineno, call.end_lineno, call.col_offset, call.end_col_offset
            found[place] = _Report(attributes, calls) if is_report else None
    return {place: report for place, report in found.items() if report is not None}


def _called(node: ast.AST) -> list[ast.Call]:
    """What a node calls: a function, one that it hands on (`key=`), or an object by its methods (`file=`, `with`)."""
    objects = [each.value for each in getattr(node, "keywords", ()) if each.arg in ("file", "key")]
    objects += [node.context_expr] if isinstance(node, ast.withitem) else []
    return [*(ast.Call(each, [], []) for each in objects), *([node] if isinstance(node, ast.Call) else [])]


def _behind_questions(function: ast.FunctionDef) -> Iterator[tuple[ast.Call, Sequence[ast.stmt]]]:
    """Each call that asks in a condition, with the statements that do not run if it returns True: the body of `if not`,
    or what follows `if ...: return`."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and not node.orelse:
            yield from ((call, node.body) for call in _settling(node.test, False))
    for number, node in enumerate(function.body):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Return) and node.body[0].value is None:
            yield from ((call, function.body[number + 1 :]) for call in _settling(node.test, True))


def _settling(test: ast.expr, answer: bool) -> Iterator[ast.Call]:
    """The calls that ask in a condition, and give it this answer by returning True."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _settling(test.operand, not answer)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) is answer:
        yield from (call for each in test.values for call in _settling(each, answer))
    elif isinstance(test, ast.Call) and answer and _last_name(test.func) in ("is_compiling", "is_exporting"):
        yield test


def _acts(node: ast.AST) -> bool:
    """Whether code does more than measure, tell, and set variables and attributes."""
    if isinstance(node, ast.Call):
        return not any(names.fullmatch(_last_name(node.func)) for names in (_TELLS, _MEASURES))
    stores = (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)) or getattr(node, "arg", "") == "out"
    return stores or isinstance(node, _OTHER_CODE) or (isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS))


def _last_name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _stored(nodes: Sequence[ast.AST], kind: type) -> frozenset[str]:
    stored = [each for each in nodes if isinstance(each, kind) and isinstance(each.ctx, ast.Store)]  # type: ignore[attr-defined]
    return frozenset(map(_last_name, stored))  # type: ignore[arg-type]


def _other_names(function: ast.FunctionDef, inside: Sequence[ast.AST]) -> set[str]:
    """The variables of the rest of a function, and those that it declares to be another's."""
    rest = [node for node in ast.walk(function) if node not in inside]
    return {name for node in rest for name in getattr(node, "names", [getattr(node, "id", "")])}


@contextlib.contextmanager
def failed_questions(note: Callable[[], None]) -> Iterator[None]:
    """Inside, call `note` for every question about an open number, even if its error is caught."""
    places: list[tuple[type, str]] = [(torch.SymInt, "__hash__")]
    with contextlib.ExitStack() as stack:
        for kind, name in (*places, *((error, "__init__") for error in DATA_DEPENDENT_ERRORS)):
            stack.enter_context(told_of_calls(kind, name, note))
        yield


@contextlib.contextmanager
def with_eagers_types() -> Iterator[None]:
    """Inside, an open number can be written in any format (by its name, with `%` as nan or 0), and `isinstance` takes
    it for what it is in eager mode, unless torch asks. The builtin itself must be replaced: `__class__`, by which an
    object passes for another's, cannot be given to a class that exists."""
    truth = builtins.isinstance

    def answer(value: Any, kinds: Any) -> bool:
        is_open = type(value) in OPEN_NUMBERS and _asker().partition(".")[0] not in _TRACERS
        return truth(OPEN_NUMBERS[type(value)] if is_open else value, kinds)

    with contextlib.ExitStack() as stack:
        for kind in OPEN_NUMBERS:
            stack.enter_context(replaced_attribute(kind, "__format__", lambda number, _: str(number)))
            for name in vars(kind).keys() & _CONVERSIONS.keys():
                stack.enter_context(replaced(kind, name, _in_text(getattr(kind, name), _CONVERSIONS[name])))
        stack.enter_context(replaced(builtins, "isinstance", answer))
        yield


def _in_text(convert: Callable[[Any], Any], unknown: float) -> Callable[[Any], Any]:
    return lambda number: unknown if _is_formatting(inspect.currentframe()) else convert(number)


def _is_formatting(inner: Any) -> bool:
    """Whether the caller of a frame is at `text % numbers`: no other remainder converts an open number."""
    instructions, at = dis.get_instructions(inner.f_back.f_code), inner.f_back.f_lasti
    return any(each.offset == at and each.argrepr in ("%", "%=") for each in instructions)


def _asker() -> str:
    """The module of the code that asks, two frames up."""
    frame = inspect.currentframe()
    try:
        return str(frame.f_back.f_back.f_globals.get("__name__"))  # type: ignore[union-attr]
    finally:
        del frame  # a frame that holds itself would keep the fake tensors of all frames above it
