"""The options of `zbcompile.pipeline` as flags of command lines. Imports no torch, so that `--help`
answers immediately."""

import argparse
from collections.abc import Iterable
from typing import Any

_RECOMPUTE = "off|hints|selective|full|SHARE|BYTES|POLICY,POLICY"
OPTION_FLAGS: dict[
    str, dict[str, Any]
] = {  # what argparse takes for an option of zbcompile.pipeline
    "schedule": {
        "metavar": "NAME",
        "help": "a name in any spelling, or a .csv, .json or .txt file (default: zb-v)",
    },
    "microbatches": {
        "type": int,
        "metavar": "N",
        "help": "how many equal parts each batch is split into",
    },
    "ranks": {
        "type": int,
        "metavar": "N",
        "help": "how many ranks (default: 2, or those of a schedule file)",
    },
    "chunks": {
        "type": int,
        "metavar": "N",
        "help": "stages per rank, for the interleaved schedules",
    },
    "exact": {
        "action": "store_true",
        "help": "gradients bitwise equal to eager gradient accumulation (fp32)",
    },
    "recompute": {
        "metavar": _RECOMPUTE,
        "type": lambda text: tuple(text.split(",")) if "," in text else text,
        "help": (
            "what each backward recomputes instead of keeping it from the forward (default: hints)"
        ),
    },
    "memory": {"metavar": "BYTES", "help": "the most bytes that a rank may hold"},
    "optimizer_state": {
        "type": float,
        "metavar": "X",
        "help": (
            "bytes of optimizer state per byte of trained parameter, for --memory (default: 2.0)"
        ),
    },
    "vocab": {
        "choices": ("off", "auto", 1, 2),
        "type": lambda text: int(text) if text.isdecimal() else text,
        "help": (
            "whether the output layer and its loss are sharded over all ranks by rows of the"
            " vocabulary"
        ),
    },
    "balance": {
        "metavar": "flops|NAME,NAME",
        "type": lambda text: text if text == "flops" or "|" in text else tuple(text.split(",")),
        "help": "how the model is cut: into equal FLOPs, or at these modules (default: flops)",
    },
    "hardware": {
        "metavar": "NAME|FILE.toml",
        "help": "what the model is cut and its step predicted for",
    },
    "accumulate_dtype": {
        "metavar": "DTYPE",
        "help": "the dtype in which a step sums gradients (default: float32)",
    },
    "pairs": {
        "choices": ("auto", "given"),
        "help": "whether passes are paired to hide exchanges (default: auto)",
    },
    "loss_reduction": {
        "choices": ("mean", "sum"),
        "help": "how the microbatches' losses are joined (default: mean)",
    },
    "split": {
        "metavar": "INPUT=yes|no|DIM",
        "type": lambda text: _split_from_text(text),
        "action": "append",
        "help": "how an input is split into microbatches, by path or keyword name",
    },
    "seed": {"type": int, "metavar": "N", "help": "enters zbcompile.microbatch_seed (default: 0)"},
    "backend": {"choices": ("fx", "inductor"), "help": "what runs the graphs (default: fx)"},
}


def add_flags(group: Any, names: Iterable[str]) -> None:
    """Adds the flags of these options of `zbcompile.pipeline`."""
    for name in names:
        group.add_argument(flag_of(name), default=argparse.SUPPRESS, **OPTION_FLAGS[name])


def _split_from_text(text: str) -> tuple[str, bool | int]:
    name, _, answer = text.rpartition("=")
    if not name or not (answer in ("yes", "no") or answer.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form INPUT=yes, INPUT=no or INPUT=DIMENSION"
        )
    return name, int(answer) if answer.isdecimal() else answer == "yes"


def flag_of(name: str) -> str:
    """Returns the command-line flag of an option.

    >>> flag_of("loss_reduction")
    '--loss-reduction'
    """
    return f"--{name.replace('_', '-')}"


FLAGS = (  # of the options that change graphs, and of the schedule
    *(
        "schedule",
        "ranks",
        "microbatches",
        "chunks",
        "exact",
        "recompute",
        "balance",
        "hardware",
        "memory",
    ),
    *("optimizer_state", "accumulate_dtype", "vocab", "pairs", "loss_reduction"),
)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what to compile."""
    group = parser.add_argument_group("what to compile")
    add_flags(group, FLAGS)
    group.add_argument(
        "--fake",
        action="store_true",
        help="build the model of fake tensors; predict for --hardware, or an H100",
    )
