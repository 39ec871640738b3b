"""The command lines of inspect, compile and run. Imports no torch, so that `--help` answers
immediately: a command's module is imported when it runs, and `PipelineOptions` checks the values of
options."""

import argparse
import ast
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zbcompile.env import VARIABLES

# The options of `zbcompile.pipeline`, and what `--help` says of each: the form of its value, two
# spaces, and what it is.
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
_OF_COMPILE = ("split", "seed", "backend")
# of the options that change graphs, and of the schedule
FLAGS = tuple(name for name in OPTION_FLAGS if name not in _OF_COMPILE)
PREDICTION = {
    "costs": "flops|measured|FILE  times to predict with; a FILE holds costs, or the record of a"
    " step (default: flops)"
}
VIEWS = {
    "graph": "STAGE.PASS  one graph as torch.fx prints it, such as 1.B (passes F, B, W, BW)",
    "graphs": "DIR  write all graphs, each as torch.fx prints it",
    "passes": "  the passes of the compiler in order: operations, seconds",
    "compare": "NAME,NAME  predict the step under several schedules, of the same microbatches",
    "critical_path": "  the chain of actions that sets the step's length",
    "timeline": "FILE  draw the step, or those compared: .txt, .svg, .html, .json (Chrome)",
    "measured": "FILE  a recorded step (pipe.last_step.save), to compare with its prediction",
    "json": "  the tables as JSON",
}
RUN = {
    "lr": "RATE  the learning rate of AdamW (default: 1e-3)",
    "seed": "N  of dropout and the data (default: the program's)",
    "weights": "PATH  .safetensors, or a directory of them with an index",
    "checkpoint": "DIR  folder of checkpoints, shared by all ranks",
    "every": "N  steps between checkpoints (default: 100)",
    "keep": "N  checkpoints to keep (default: 3)",
    "resume": "  continue from the newest checkpoint, if any",
}
FORWARDS = ("eval", "log_probs")
_INSPECT = """examples:
  python -m zbcompile.inspect examples/targets.py:gpt
  python -m zbcompile.inspect examples/targets.py:gpt --schedule zb-h1 --ranks 4 --microbatches 8
  python -m zbcompile.inspect examples/targets.py:gpt --graph 1.B
  python -m zbcompile.inspect examples/targets.py:gpt --graphs graphs/
  python -m zbcompile.inspect examples/targets.py:gpt --passes
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --timeline step.svg
  python -m zbcompile.inspect examples/targets.py:gpt --compare 1f1b,zb-h1,zb-v --timeline step.svg
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --critical-path
  python -m zbcompile.inspect examples/targets.py:gpt --measured step.json
  python -m zbcompile.inspect mypackage.models:seventy_billion --fake --ranks 8 --json

TARGET may also be a directory made by zbcompile.compile or pipe.program.save. Else it is called
without arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch.
docs/inspect.md explains every table and the fields of --json.
"""
_COMPILE = """examples:
  python -m zbcompile.compile examples/targets.py:gpt --schedule zb-h1 --ranks 4 --output program
  python -m zbcompile.compile mypackage.models:seventy_billion --fake --ranks 8 --output program
  python -m zbcompile.compile mypackage.models:policy --only log_probs --output teacher

TARGET is called without arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch.
DIR is new or empty, or holds a program, which is replaced; docs/programs.md describes what is in
it. It holds no parameters: zbcompile.load(DIR, state_dict=...) takes them, and zbcompile.run those
that --weights writes.
"""
_RUN = """the data:
  --data FILE.py:batches (or package.module:batches) names a function, which every rank calls once,
  or an iterable. It gives one batch per step, the same on every rank, either as
      (args, kwargs)      a tuple and a mapping, what pipe.step takes, or
      {"input_ids": ...}  a mapping of keywords.
  The target of the loss that the program was compiled with is the keyword "target". The function
  gets those of these keywords for which it has parameters:
      start      the number of batches that were trained on before; the first batch that the
                 function gives is batch number `start`
      seed       --seed, or what the program was compiled with
  When a run is resumed, a function without `start` gives all batches again, and those trained on
  before are skipped. If the iterable has state_dict and load_state_dict (a stateful loader), every
  checkpoint holds its state. The generators of Python, torch and numpy are seeded before the
  function is called, and are part of a checkpoint.

examples:
  python -m zbcompile.run program --data examples/text_batches.py:batches \\
      --weights model.safetensors --steps 100
  torchrun --standalone --nproc-per-node 4 -m zbcompile.run program \\
      --data examples/text_batches.py:batches --weights model.safetensors --steps 1000 --lr 3e-4 \\
      --checkpoint checkpoints --every 100 --resume
The second one resumes after a crash or a kill, with the same bits as if it had never stopped: start
it again, or let torchrun do it (--max-restarts). The optimizer is AdamW; for everything else copy
the loop of docs/checkpoints.md into a script of your own, where zbcompile.load opens the program.
"""


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


# by the form of the value
TYPES: dict[str, Callable[[str], Any]] = {
    "N": int,
    "RATE": float,
    "FILE": Path,
    "DIR": Path,
    "PATH": Path,
    "flops|NAME,NAME": lambda text: text if text == "flops" else tuple(text.split(",")),
    "INPUT=yes|no|DIM": _split_from_text,
}


def flag_of(name: str) -> str:
    """Returns the command-line flag of an option.

    >>> flag_of("loss_reduction")
    '--loss-reduction'
    """
    return f"--{name.replace('_', '-')}"


def add_options(group: Any, names: Iterable[str]) -> None:
    """Adds the flags of these options of `zbcompile.pipeline`."""
    flags = {name: OPTION_FLAGS[name] for name in names}
    _add(group, flags, _value, default=argparse.SUPPRESS)


def _add(group: Any, flags: Mapping[str, str], read: Any = str, **more: Any) -> None:
    for name, row in flags.items():
        form, _, text = row.partition("  ")
        value = {"type": TYPES.get(form, read), "metavar": form}
        action = "append" if name == "split" else "store" if form else "store_true"
        group.add_argument(
            flag_of(name), action=action, help=text, **(value if form else {}), **more
        )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what to compile."""
    group = parser.add_argument_group("what to compile")
    add_options(group, FLAGS)
    fake = "  build the model of fake tensors; predict for --hardware, or an H100"
    _add(group, {"fake": fake})


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of inspect, compile or run."""
    description, epilog, add_arguments = COMMAND_LINES[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m zbcompile.{name}",
        description=description,
        epilog=f"{epilog}exit status: 0, or 2 with one line on standard error.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add(parser, {"debug": "  show tracebacks of errors, and what torch prints"})
    add_arguments(parser)
    return parser


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:name, path/file.py:name, or a directory"
    )
    variables, listed = "list the environment variables and exit", "\n".join(map(str, VARIABLES))
    parser.add_argument("--env", action="version", version=listed, help=variables)
    add_plan(parser)
    _add(parser.add_argument_group("what to predict"), PREDICTION)
    parser.set_defaults(costs="flops")
    _add(parser.add_argument_group("what to show, one after the other (default: a summary)"), VIEWS)


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    add("--output", metavar="DIR", type=Path, required=True, help="the directory to write")
    weights = "PATH  write the model's own weights too: .safetensors or a directory"
    _add(parser, {"weights": weights})
    only = "this forward for zbcompile.load(DIR), without a backward"
    add("--only", choices=FORWARDS, help=only)
    add_options(parser, _OF_COMPILE)
    add_plan(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    program = "a program, as zbcompile.compile and pipe.program.save write it"
    add("directory", metavar="DIR", type=Path, help=program)
    source = "the source of the batches (see below)"
    add("--data", required=True, metavar="FILE.py:NAME", help=source)
    steps = "optimizer steps in total, resumed ones included"
    add("--steps", required=True, type=int, metavar="N", help=steps)
    _add(parser, RUN)
    parser.set_defaults(lr=1e-3, every=100, keep=3)


# by command: what `--help` says before and after the arguments, and what adds these
COMMAND_LINES: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": (
        "Show how zbcompile cuts, splits and schedules a model. Runs no step, needs no GPU.",
        _INSPECT,
        add_inspect_arguments,
    ),
    "compile": (
        "Compile the training step of a model into a directory from which every rank loads its"
        " part.",
        _COMPILE,
        add_compile_arguments,
    ),
    "run": (
        "Train a compiled program with a data function; the model's source is not needed. Under"
        " torchrun each process is one rank; without it all ranks run in this process.",
        _RUN,
        add_run_arguments,
    ),
}
