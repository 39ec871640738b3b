"""The options of `zbcompile.pipeline` as flags of command lines. Imports no torch, so that `--help`
answers immediately: `PipelineOptions` checks the values."""

import argparse
import ast
from collections.abc import Iterable
from typing import Any

# What `--help` says of an option: the form of its value, two spaces, and what it is.
OPTION_FLAGS = {
    "schedule": "NAME  a name in any spelling, or a .csv, .json or .txt file (default: zb-v)",
    "microbatches": "N  how many equal parts each batch is split into",
    "ranks": "N  how many ranks (default: 2, or those of a schedule file)",
    "chunks": "N  stages per rank, for the interleaved schedules",
    "exact": "  gradients bitwise equal to eager gradient accumulation (fp32)",
    "recompute": "off|hints|selective|full|SHARE|BYTES|POLICY,POLICY  what each backward recomputes"
    " instead of keeping it from the forward (default: hints)",
    "memory": "BYTES  the most bytes that a rank may hold",
    "optimizer_state": "X  bytes of optimizer state per byte of trained parameter, for --memory"
    " (default: 2.0)",
    "vocab": "off|auto|1|2  whether the output layer and its loss are sharded over all ranks by"
    " rows of the vocabulary",
    "balance": "flops|NAME,NAME  how the model is cut: into equal FLOPs, or at these modules"
    " (default: flops)",
    "hardware": "NAME|FILE.toml  what the model is cut and its step predicted for",
    "accumulate_dtype": "DTYPE  the dtype in which a step sums gradients (default: float32)",
    "pairs": "auto|given  whether passes are paired to hide exchanges (default: auto)",
    "loss_reduction": "mean|sum  how the microbatches' losses are joined (default: mean)",
    "split": "INPUT=yes|no|DIM  how an input is split into microbatches, by path or keyword name",
    "seed": "N  enters zbcompile.microbatch_seed (default: 0)",
    "backend": "fx|inductor  what runs the graphs (default: fx)",
}


def add_flags(group: Any, names: Iterable[str]) -> None:
    """Adds the flags of these options of `zbcompile.pipeline`."""
    for name in names:
        metavar, _, text = OPTION_FLAGS[name].partition("  ")
        action = {"exact": "store_true", "split": "append"}.get(name, "store")
        value = {"type": _TYPES.get(name, _value), "metavar": metavar} if metavar else {}
        flag = flag_of(name)
        group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text, **value)


def _value(text: str) -> Any:
    """Returns a number, a tuple of what is separated by commas, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return tuple(text.split(",")) if "," in text else text


def _split_from_text(text: str) -> tuple[str, bool | int]:
    name, _, answer = text.rpartition("=")
    if not name or not (answer in ("yes", "no") or answer.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form INPUT=yes, INPUT=no or INPUT=DIMENSION"
        )
    return name, int(answer) if answer.isdecimal() else answer == "yes"


_TYPES = {
    "balance": lambda text: text if text == "flops" else tuple(text.split(",")),
    "split": _split_from_text,
}


def flag_of(name: str) -> str:
    """Returns the command-line flag of an option.

    >>> flag_of("loss_reduction")
    '--loss-reduction'
    """
    return f"--{name.replace('_', '-')}"


_OF_COMPILE = ("split", "seed", "backend")
# of the options that change graphs, and of the schedule
FLAGS = tuple(name for name in OPTION_FLAGS if name not in _OF_COMPILE)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what to compile."""
    group = parser.add_argument_group("what to compile")
    add_flags(group, FLAGS)
    group.add_argument(
        "--fake",
        action="store_true",
        help="build the model of fake tensors; predict for --hardware, or an H100",
    )
