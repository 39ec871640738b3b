"""Tracebacks of errors as users read them: the frames of their own code, without those of torch and of this package.

`ZBCOMPILE_TRACEBACK=1` shows all frames.
"""

import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from zbcompile.env import TRACEBACK
from zbcompile.errors import FaultError, PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.schedules.errors import ScheduleError

Entered = TypeVar("Entered")
FOR_USERS = (PipelineError, CompileError, ScheduleError)
_HIDDEN = (*(f"{Path(module).parent}/" for module in (torch.__file__, __file__, contextlib.__file__)), "<string>")
_LONGEST = 160  # characters of an error that another rank has printed


class UserTraceback(contextlib.AbstractContextManager[Entered]):
    """`inner`, whose errors for users keep the frames of users' code only: those inside of it, then those of the error
    that was the cause."""

    def __init__(self, inner: contextlib.AbstractContextManager[Entered]) -> None:
        self._inner = inner

    def __enter__(self) -> Entered:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> bool | None:
        raised = error
        try:
            return self._inner.__exit__(kind, error, frames)
        except BaseException as other:
            raised = other
            raise
        finally:
            own = isinstance(raised, FaultError) and raised.__cause__ is not None  # whose cause is the user's error
            if isinstance(raised, FOR_USERS) and not own and not TRACEBACK.read():
                _shorten(raised)


def _shorten(error: BaseException) -> None:
    """Leave the frames of users' code, and the error's cause unless the message quotes it."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = _of_users(error.__traceback__)
    if cause is not None:
        frames += (of_cause := _of_users(cause.__traceback__))
        cause.__traceback__ = None
        if not of_cause:
            error.add_note(f"({TRACEBACK.name}=1 shows where {type(cause).__name__} was raised.)")
        if str(cause).partition("\n")[0] in str(error):
            error.__cause__ = None  # this suppresses the context, too
    error.__traceback__ = _linked(frames)


def _of_users(found: TracebackType | None) -> list[TracebackType]:
    frames = []
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            frames.append(found)
        found = found.tb_next
    return frames


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    first = None
    for each in reversed(frames):
        first = TracebackType(first, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return first


def print_in_one_line(error: Exception, rank: int) -> None:
    """Let an error that ends this process be printed in one line: the first rank prints the same one in full."""
    error._printed_by_first = rank  # type: ignore[attr-defined]
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)


class _OneLine:
    def __init__(self, usual: object) -> None:
        self._usual = usual

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        rank = getattr(error, "_printed_by_first", None)
        if rank is None or TRACEBACK.read():
            self._usual(kind, error, frames)  # type: ignore[operator]
            return
        text = " ".join(str(error).split())
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        print(
            f"zbcompile: rank {rank} ends with the error that rank 0 prints: {kind.__name__}: {shown}", file=sys.stderr
        )
