"""The common parts of command lines: the options of `zbcompile.pipeline` as flags, and the exit: 0, or 2 with one line
on standard error. A new option of a pipeline is a field (docs/architecture.md), a flag of one command is in its
`add_arguments`."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.options import OPTIONS, PARAGRAPHS
from zbcompile.passes.errors import CompileError
from zbcompile.progress import Say, silent
from zbcompile.schedules import ScheduleError

FAILED = 2
_EXPECTED = (PipelineError, CompileError, ScheduleError, OSError)


@dataclass(frozen=True)
class Command:
    """One command: its text in `--help`, its own arguments besides the common ones, and the function that it runs.

    `run` receives the parsed arguments and a function for progress messages. It prints its result, or raises an error,
    which is written to standard error as one line.
    """

    name: str
    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Say], None]

    def __call__(self, arguments: Sequence[str] | None = None, say: Say = silent) -> int:
        """Run the command line; returns the exit status."""
        parser = argparse.ArgumentParser(
            prog=f"python -m zbcompile.{self.name}",
            description=self.description,
            epilog=f"{self.epilog}exit status: 0, or 2 with one line on standard error.\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--debug", action="store_true", help="show tracebacks of errors, and what torch prints")
        self.add_arguments(parser)
        chosen = parser.parse_args(arguments)
        of_caller = dist.is_initialized()
        try:
            self.run(chosen, say)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the pipe has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            rank = f": rank {os.environ['RANK']}" if self.name == "run" and "RANK" in os.environ else ""
            return _fail(f"zbcompile.{self.name}{rank}", error, chosen.debug)
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


def add_flags(group: Any, names: Iterable[str], **instead: str) -> None:
    """Add a flag for each of these options. Its help is the first sentence of the option's paragraph and its default,
    which a second sentence may explain, or the text that `instead` has for it."""
    for name in names:
        option = OPTIONS[name]
        kind, text = option.metadata["kind"], PARAGRAPHS.get(name, "")
        summary = text[:1].lower() + text[1:] if text[1:2].islower() else text
        summary, _, more = summary.replace("`", "").replace("%", "%%").partition(". ")
        usual = more[9:].partition(". ")[0].rstrip(".") if more.startswith("Default: ") else option.default
        default = "" if usual in (None, False) else f" (default: {usual})"
        text = instead.get(name, f"{summary.rstrip('.')}{default}")
        group.add_argument(flag_of(name), default=argparse.SUPPRESS, help=text, **kind.flag)


def flag_of(name: str) -> str:
    """An option as it is written on a command line.

    >>> flag_of("boundary_bytes")
    '--boundary-bytes'
    """
    return f"--{name.replace('_', '-')}"


def split_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments, with the pipeline's options gathered under `given`."""
    found = vars(arguments)
    given = {name: found.pop(name) for name in OPTIONS if name in found}
    return {**found, "given": given}
