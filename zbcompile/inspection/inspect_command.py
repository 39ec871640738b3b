"""The inspect command: what zbcompile would compile a model to, without running it."""

import argparse
from pathlib import Path
from typing import Any

from zbcompile.cli.command_line import Command, split_options
from zbcompile.cli.compile_arguments import add_plan
from zbcompile.env import VARIABLES
from zbcompile.inspection.commands import run
from zbcompile.inspection.request import FORMATS, Request
from zbcompile.passes.pass_list.passes_in_order import PASS_NAMES
from zbcompile.progress import Say

EXAMPLES = """examples:
  python -m zbcompile.inspect examples/targets.py:gpt
  python -m zbcompile.inspect examples/targets.py:gpt --schedule zb-h1 --ranks 4 --microbatches 8
  python -m zbcompile.inspect examples/targets.py:gpt --graph 1.B
  python -m zbcompile.inspect examples/targets.py:gpt --graphs graphs/ --format html
  python -m zbcompile.inspect examples/targets.py:gpt --diff split accumulate --stage 1
  python -m zbcompile.inspect examples/targets.py:gpt --passes
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --timeline step.svg
  python -m zbcompile.inspect examples/targets.py:gpt --compare 1f1b,zb-h1,zb-v --timeline compared.svg
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --explain-idle 2
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --critical-path
  python -m zbcompile.inspect examples/targets.py:gpt --measured step.json
  python -m zbcompile.inspect mypackage.models:seventy_billion --fake --ranks 8 --json

TARGET may also be a directory made by zbcompile.compile or pipe.program.save. Else it is called without
arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch.
docs/inspect.md explains every table and the fields of --json.
"""


def _run(chosen: argparse.Namespace, say: Say) -> None:
    run(Request(**split_options(chosen), say=say))


class _Environment(argparse.Action):
    """Like --help: it needs nothing else and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        for variable in VARIABLES:
            print(variable)
        parser.exit()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="package.module:name, path/file.py:name, or a directory")
    nothing = argparse.SUPPRESS  # as for --help, no value is left behind
    parser.add_argument(
        "--env", action=_Environment, nargs=0, default=nothing, help="list the environment variables and exit"
    )
    add_plan(parser)
    add = parser.add_argument_group("what to predict").add_argument
    add(
        "--costs",
        default="flops",
        metavar="flops|uniform|measured|FILE",
        help="times to predict with; a FILE holds costs, or the record of a step (default: flops)",
    )
    add("--fused", action="store_true", help="chains of elementwise operations take one kernel, as with inductor")
    add("--replicas", type=int, default=1, metavar="N", help="data-parallel copies of the pipeline, for the memory")
    add("--zero", type=int, choices=(0, 1, 2), default=0, help="what replicas divide, for the memory (default: 0)")
    _add_output(parser.add_argument_group("what to show (default: a summary)"))


def _add_output(group: Any) -> None:
    add, show = group.add_argument, group.add_mutually_exclusive_group().add_argument
    show("--graph", metavar="STAGE.PASS", help="one graph as Python, such as 1.B (passes F, B, W, BW)")
    show("--graphs", metavar="DIR", type=Path, help="write all graphs: Python files, or as --format says")
    show(
        "--diff",
        nargs=2,
        choices=PASS_NAMES,
        metavar=("PASS", "PASS"),
        help="what changed in a stage between two passes of the compiler; --passes lists them",
    )
    show("--passes", action="store_true", help="the passes in order: operations before, after, seconds")
    show("--compare", metavar="NAME,NAME", help="predict the step under several schedules")
    show("--explain-idle", metavar="RANK", type=int, help="the longest idle intervals and what caused them")
    show("--critical-path", action="store_true", help="the chain of actions that sets the step's length")
    add(
        "--timeline",
        metavar="FILE",
        type=Path,
        help="draw the step, or those compared: .txt, .svg, .html, .json (Chrome)",
    )
    add("--measured", metavar="FILE", type=Path, help="a recorded step (pipe.last_step.save) beside its prediction")
    effort = group.add_mutually_exclusive_group().add_argument
    effort("--quick", action="store_true", help="leave out predictions that need another compilation")
    effort("--thorough", action="store_true", help="make those predictions however large the model is")
    add("--stage", type=int, metavar="N", help="the stage of --diff (default: the first)")
    add("--format", choices=FORMATS, default="text", help="of --graph and --graphs (default: text)")
    add("--json", action="store_true", help="the summary, the comparison or --passes as JSON")


DESCRIPTION = "Show how zbcompile cuts, splits and schedules a model. Runs no step, needs no GPU."
main = Command("inspect", DESCRIPTION, EXAMPLES, _add_arguments, _run)
