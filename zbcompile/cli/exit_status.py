"""How the command lines end: with 0, or with 2 and one line on standard error."""

import os
import sys
import traceback
from collections.abc import Callable

from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.schedules import ScheduleError

FAILED = 2
_EXPECTED = (PipelineError, CompileError, ScheduleError, OSError)


def exit_status(command: str, run: Callable[[], None], debug: bool) -> int:
    """Run a command and return its exit status; an error becomes one line (with `debug` the traceback before it)."""
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        return _fail(command, error, debug)
    return 0


def _fail(command: str, error: Exception, debug: bool) -> int:
    """Unexpected exceptions are labelled as such."""
    if debug:
        traceback.print_exc()
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.filename:
        first = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, _EXPECTED):
        first = f"unexpected {type(error).__name__}: {first} (--debug shows where)"
    print(f"{command}: {first}", file=sys.stderr)
    return FAILED
