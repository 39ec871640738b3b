"""Runs the command of a parsed command line, and turns errors into one line on standard error."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.options import OPTIONS
from zbcompile.progress import Say
from zbcompile.schedules import ScheduleError

FAILED = 2
_EXPECTED = (PipelineError, ScheduleError, OSError)


def run_command(
    name: str, run: Callable[[argparse.Namespace, Say], None], chosen: argparse.Namespace, say: Say
) -> int:
    """Runs a command; returns the exit status. `run` prints its result, or raises an error, which
    is written to standard error as one line."""
    of_caller = dist.is_initialized()
    try:
        run(chosen, say)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        rank = f": rank {os.environ['RANK']}" if name == "run" and "RANK" in os.environ else ""
        return _fail(f"zbcompile.{name}{rank}", error, chosen.debug)
    finally:
        if dist.is_initialized() and not of_caller:
            dist.destroy_process_group()
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


def split_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments, with the pipeline's options gathered under `keywords`."""
    keywords = vars(arguments)
    options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
    return {**keywords, "keywords": options}
