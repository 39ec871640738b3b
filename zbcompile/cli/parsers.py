"""The command lines of inspect, compile and run. Imports no torch: a command's module is imported
when it runs."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
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
  or an iterable. It gives one batch per step, the same on every rank of a replica, either as
      (args, kwargs)      a tuple and a mapping, what pipe.step takes, or
      {"input_ids": ...}  a mapping of keywords.
  The target of the loss that the program was compiled with is the keyword "target". The function
  gets those of these keywords for which it has parameters:
      start               the number of batches that were trained on before; the first batch that
                          the function gives is batch number `start`
      seed                --seed, or what the program was compiled with
      replica, replicas   index of this replica of the pipeline and number of replicas: each trains
                          on its own batches
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


@dataclass(frozen=True)
class CommandLine:
    """The arguments of one command besides the common ones, and what `--help` says of it."""

    description: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]

    def parser(self, name: str) -> argparse.ArgumentParser:
        """The parser of the command `name`."""
        parser = argparse.ArgumentParser(
            prog=f"python -m zbcompile.{name}",
            description=self.description,
            epilog=f"{self.epilog}exit status: 0, or 2 with one line on standard error.\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--debug", action="store_true", help="show tracebacks of errors, and what torch prints"
        )
        self.add_arguments(parser)
        return parser


class _Environment(argparse.Action):
    """An action like --help, which needs no other argument and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        for variable in VARIABLES:
            print(variable)
        parser.exit()


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="package.module:name, path/file.py:name, or a directory"
    )
    nothing = argparse.SUPPRESS  # as for --help, no value is left behind
    parser.add_argument(
        "--env",
        action=_Environment,
        nargs=0,
        default=nothing,
        help="list the environment variables and exit",
    )
    add_plan(parser)
    add = parser.add_argument_group("what to predict").add_argument
    add(
        "--costs",
        default="flops",
        metavar="flops|measured|FILE",
        help="times to predict with; a FILE holds costs, or the record of a step (default: flops)",
    )
    _add_output(parser.add_argument_group("what to show, one after the other (default: a summary)"))


def _add_output(group: Any) -> None:
    add = group.add_argument
    add(
        "--graph",
        metavar="STAGE.PASS",
        help="one graph as torch.fx prints it, such as 1.B (passes F, B, W, BW)",
    )
    add("--graphs", metavar="DIR", type=Path, help="write all graphs, each as torch.fx prints it")
    add(
        "--passes",
        action="store_true",
        help="the passes of the compiler in order: operations, seconds",
    )
    add(
        "--compare",
        metavar="NAME,NAME",
        help="predict the step under several schedules, of the same microbatches",
    )
    add(
        "--critical-path",
        action="store_true",
        help="the chain of actions that sets the step's length",
    )
    add(
        "--timeline",
        metavar="FILE",
        type=Path,
        help="draw the step, or those compared: .txt, .svg, .html, .json (Chrome)",
    )
    add(
        "--measured",
        metavar="FILE",
        type=Path,
        help="a recorded step (pipe.last_step.save), to compare with its prediction",
    )
    add("--json", action="store_true", help="the tables as JSON")


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, required=True, help="the directory to write"
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        type=Path,
        help="write the model's own weights too: .safetensors or a directory",
    )
    parser.add_argument(
        "--only", choices=FORWARDS, help="this forward for zbcompile.load(DIR), without a backward"
    )
    add_flags(parser, ("split", "seed", "backend"))
    add_plan(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "directory",
        metavar="DIR",
        type=Path,
        help="a program, as zbcompile.compile and pipe.program.save write it",
    )
    add(
        "--data",
        required=True,
        metavar="FILE.py:NAME",
        help="the source of the batches (see below)",
    )
    add("--steps", required=True, type=int, help="optimizer steps in total, resumed ones included")
    add(
        "--lr",
        type=float,
        default=1e-3,
        metavar="RATE",
        help="the learning rate of AdamW (default: 1e-3)",
    )
    add("--seed", type=int, help="of dropout, --init and the data (default: the program's)")
    add(
        "--weights",
        type=Path,
        metavar="PATH",
        help=".safetensors, a directory of them with an index, or a checkpoint",
    )
    init = (
        "a function init(name, tensor) that fills a tensor in place; --weights are loaded after it"
    )
    add("--init", metavar="FILE.py:NAME", help=init)
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints, shared by all ranks")
    add(
        "--every",
        type=int,
        default=100,
        metavar="N",
        help="steps between checkpoints (default: 100)",
    )
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (default: 3)")
    add(
        "--save-async",
        action="store_true",
        help="keep training while a checkpoint is written (takes memory)",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    add(
        "--export",
        type=Path,
        metavar="PATH",
        help="write the final weights: .safetensors or a directory",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="replicas of the pipeline (data parallel)",
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="torch's threads per process (default: torch's own choice)",
    )
    operator = "an operator of another library that the program may call; --data must import it"
    add(
        "--operator",
        action="append",
        default=[],
        dest="operators",
        metavar="LIBRARY::NAME",
        help=operator,
    )
    add(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        help="steps between log lines (default: 10)",
    )
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a rank waits for another one",
    )


COMMAND_LINES = {
    "inspect": CommandLine(
        "Show how zbcompile cuts, splits and schedules a model. Runs no step, needs no GPU.",
        _INSPECT,
        add_inspect_arguments,
    ),
    "compile": CommandLine(
        "Compile the training step of a model into a directory from which every rank loads its"
        " part.",
        _COMPILE,
        add_compile_arguments,
    ),
    "run": CommandLine(
        "Train a compiled program with a data function; the model's source is not needed. Under"
        " torchrun each process is one rank; without it all ranks run in this process.",
        _RUN,
        add_run_arguments,
    ),
}
