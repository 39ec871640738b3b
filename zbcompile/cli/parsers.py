"""The command lines of inspect, compile and run. Imports no torch: a command's module is imported
when it runs."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zbcompile.cli.option_flags import add_flags, add_plan
from zbcompile.env import VARIABLES

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


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of inspect, compile or run."""
    description, epilog, add_arguments = COMMAND_LINES[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m zbcompile.{name}",
        description=description,
        epilog=f"{epilog}exit status: 0, or 2 with one line on standard error.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    debug = "show tracebacks of errors, and what torch prints"
    parser.add_argument("--debug", action="store_true", help=debug)
    add_arguments(parser)
    return parser


class _Environment(argparse.Action):
    """An action like --help, which needs no other argument and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        for variable in VARIABLES:
            print(variable)
        parser.exit()


# What `--help` says of a flag: the form of its value with a default, two spaces, and what it is.
PREDICTION = {
    "--costs": "flops|measured|FILE=flops  times to predict with; a FILE holds costs, or the record"
    " of a step"
}
VIEWS = {
    "--graph": "STAGE.PASS  one graph as torch.fx prints it, such as 1.B (passes F, B, W, BW)",
    "--graphs": "DIR  write all graphs, each as torch.fx prints it",
    "--passes": "  the passes of the compiler in order: operations, seconds",
    "--compare": "NAME,NAME  predict the step under several schedules, of the same microbatches",
    "--critical-path": "  the chain of actions that sets the step's length",
    "--timeline": "FILE  draw the step, or those compared: .txt, .svg, .html, .json (Chrome)",
    "--measured": "FILE  a recorded step (pipe.last_step.save), to compare with its prediction",
    "--json": "  the tables as JSON",
}
RUN = {
    "--lr": "RATE=1e-3  the learning rate of AdamW",
    "--seed": "N  of dropout, --init and the data (default: the program's)",
    "--weights": "PATH  .safetensors, or a directory of them with an index",
    "--init": "FILE.py:NAME  a function init(name, tensor) that fills a tensor in place; --weights"
    " are loaded after it",
    "--checkpoint": "DIR  folder of checkpoints, shared by all ranks",
    "--every": "N=100  steps between checkpoints",
    "--keep": "N=3  checkpoints to keep",
    "--resume": "  continue from the newest checkpoint, if any",
    "--export": "PATH  write the final weights: .safetensors or a directory",
    "--log-every": "N=10  steps between log lines",
    "--timeout": "SECONDS=300  how long a rank waits for another one",
}
TYPES = {"N": int, "RATE": float, "SECONDS": float, "FILE": Path, "DIR": Path, "PATH": Path}


def _add(group: Any, flags: Mapping[str, str]) -> None:
    for flag, row in flags.items():
        form, _, text = row.partition("  ")
        metavar, _, default = form.partition("=")
        if not form:
            group.add_argument(flag, action="store_true", help=text)
            continue
        kind, text = TYPES.get(metavar, str), f"{text} (default: {default})" if default else text
        group.add_argument(flag, type=kind, metavar=metavar, default=default or None, help=text)


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:name, path/file.py:name, or a directory"
    )
    variables = "list the environment variables and exit"
    parser.add_argument(
        "--env", action=_Environment, nargs=0, default=argparse.SUPPRESS, help=variables
    )
    add_plan(parser)
    _add(parser.add_argument_group("what to predict"), PREDICTION)
    _add(parser.add_argument_group("what to show, one after the other (default: a summary)"), VIEWS)


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    add("--output", metavar="DIR", type=Path, required=True, help="the directory to write")
    weights = "write the model's own weights too: .safetensors or a directory"
    add("--weights", metavar="PATH", type=Path, help=weights)
    only = "this forward for zbcompile.load(DIR), without a backward"
    add("--only", choices=FORWARDS, help=only)
    add_flags(parser, ("split", "seed", "backend"))
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
    operator = "an operator of another library that the program may call; --data must import it"
    add(
        "--operator",
        action="append",
        default=[],
        dest="operators",
        metavar="LIBRARY::NAME",
        help=operator,
    )


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
