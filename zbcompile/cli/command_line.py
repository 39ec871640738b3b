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
from zbcompile.options import BACKENDS, OPTIONS
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


_RECOMPUTE = "off|hints|selective|full|PRICE|SHARE|BYTES|POLICY,POLICY"
OPTION_FLAGS: dict[str, dict[str, Any]] = {  # what argparse takes for an option of zbcompile.pipeline
    "schedule": {"metavar": "NAME", "help": "a name in any spelling, or a .csv, .json or .txt file (default: zb-v)"},
    "microbatches": {"type": int, "metavar": "N", "help": "how many equal parts each batch is split into"},
    "ranks": {"type": int, "metavar": "N", "help": "how many ranks (default: 2, or those of a schedule file)"},
    "chunks": {"type": int, "metavar": "N", "help": "stages per rank, for the interleaved schedules"},
    "exact": {"action": "store_true", "help": "gradients bitwise equal to eager gradient accumulation (fp32)"},
    "recompute": {
        "metavar": _RECOMPUTE,
        "type": lambda text: tuple(text.split(",")) if "," in text else text,
        "help": "what each backward recomputes instead of keeping it from the forward (default: hints)",
    },
    "memory": {"metavar": "BYTES", "help": "the most bytes that a rank may hold"},
    "optimizer_state": {
        "type": float,
        "metavar": "X",
        "help": "bytes of optimizer state per byte of trained parameter, for --memory (default: 2.0)",
    },
    "vocab": {
        "choices": ("off", "auto", 1, 2),
        "type": lambda text: int(text) if text.isdecimal() else text,
        "help": "whether the output layer and its loss are sharded over all ranks by rows of the vocabulary",
    },
    "balance": {
        "metavar": "flops|NAME,NAME",
        "type": lambda text: text if text == "flops" or "|" in text else tuple(text.split(",")),
        "help": "how the model is cut: into equal FLOPs, or at these modules (default: flops)",
    },
    "hardware": {"metavar": "NAME|FILE.toml", "help": "what the model is cut and its step predicted for"},
    "accumulate_dtype": {"metavar": "DTYPE", "help": "the dtype in which a step sums gradients (default: float32)"},
    "pairs": {"choices": ("auto", "given"), "help": "whether passes are paired to hide exchanges (default: auto)"},
    "loss_reduction": {"choices": ("mean", "sum"), "help": "how the microbatches' losses are joined (default: mean)"},
    "split": {
        "metavar": "INPUT=yes|no|DIM",
        "type": lambda text: _split_from_text(text),
        "action": "append",
        "help": "how an input is split into microbatches, by path or keyword name",
    },
    "seed": {"type": int, "metavar": "N", "help": "enters zbcompile.microbatch_seed (default: 0)"},
    "backend": {"choices": BACKENDS, "help": "what runs the graphs (default: fx)"},
    "timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": "how long a rank waits for another one before all ranks end with an error that names it",
    },
    "debug_nan": {"action": "store_true", "help": "stop at the first operation that makes a NaN or an infinity"},
}


def add_flags(group: Any, names: Iterable[str]) -> None:
    """Adds the flags of these options of `zbcompile.pipeline`."""
    for name in names:
        group.add_argument(flag_of(name), default=argparse.SUPPRESS, **OPTION_FLAGS[name])


def _split_from_text(text: str) -> tuple[str, bool | int]:
    name, _, answer = text.rpartition("=")
    if not name or not (answer in ("yes", "no") or answer.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INPUT=yes, INPUT=no or INPUT=DIMENSION")
    return name, int(answer) if answer.isdecimal() else answer == "yes"


def flag_of(name: str) -> str:
    """An option as it is written on a command line.

    >>> flag_of("loss_reduction")
    '--loss-reduction'
    """
    return f"--{name.replace('_', '-')}"


def split_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments, with the pipeline's options gathered under `given`."""
    found = vars(arguments)
    given = {name: found.pop(name) for name in OPTIONS if name in found}
    return {**found, "given": given}
