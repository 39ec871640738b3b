"""Deferred checks: what an `assert`, or an `if` that only raises, asks of a tensor whose value no trace knows.

Such a statement decides only whether the step goes on. The trace goes on as if it held; what it asks becomes a result
of the graph, which the runtime looks at after the forward pass of each microbatch. `require_fit` is such a check of our
own, at which the runtime looks at the end of the step.
"""

import ast
import dis
import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from zbcompile.passes.exported.capture.expert_capacity import require_fit as require_fit
from zbcompile.passes.graph.source_location import is_own

_TRUTHS = ("POP_JUMP", "TO_BOOL")  # instructions that ask what the one before them has computed
_COMPARISON = "COMPARE_OP"  # since Python 3.13 it asks its own result
_BETWEEN = ("EXTENDED_ARG", "NOP")


def required_answer(function: Any) -> bool | None:
    """The answer with which the user's statement goes on, if it is an `assert`, or an `if` that only raises, and now
    asks a tensor by `function`. None for any other statement, or if one answer alone does not settle it."""
    if function not in (torch.Tensor.__bool__, torch.Tensor.item):
        return None
    frame = inspect.currentframe()
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    reads = function is torch.Tensor.item
    end = _end_of_question(frame.f_code, frame.f_lasti, reads)
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    asked = ((each, answer) for each, answer in _questions(source) if (each.end_lineno, each.end_col_offset) == end)
    return next((answer for each, answer in asked if _is_item(each) is reads), None)


def _end_of_question(code: CodeType, at: int, reads: bool) -> tuple[int | None, int | None] | None:
    """The last line and column of the expression whose truth, or number, is asked by the instruction `at`."""
    before = [each for each in dis.get_instructions(code) if each.offset <= at and each.opname not in _BETWEEN]
    asks = before.pop()
    if asks.opname.startswith(_TRUTHS):
        asks = before.pop()
    elif not reads and asks.opname != _COMPARISON:
        return None
    return (asks.positions.end_lineno, asks.positions.end_col_offset) if asks.positions else None


@lru_cache(maxsize=4)  # every layer asks again
def _questions(source: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The expressions that asserts and raising ifs ask, each with the answer that lets the statement go on."""
    try:
        statements = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # the file has been edited
        return ()
    asserts = [each for s in statements if isinstance(s, ast.Assert) for each in _parts(s.test, True)]
    ifs = [s for s in statements if isinstance(s, ast.If) and all(isinstance(each, ast.Raise) for each in s.body)]
    return (*asserts, *(each for s in ifs for each in _parts(s.test, False)))


def _parts(test: ast.expr, answer: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition whose answer is known if the whole has `answer`. Python asks the last part of an `and`
    only if all others are true: it must be false if the whole is."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not answer)
    elif isinstance(test, ast.BoolOp):
        for each in test.values if isinstance(test.op, ast.And) is answer else test.values[-1:]:
            yield from _parts(each, answer)
    elif not isinstance(test, ast.Compare) or len(test.ops) == 1 or answer:
        yield test, answer


def _is_item(node: ast.expr) -> bool:
    """Whether an expression is `tensor.item()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
