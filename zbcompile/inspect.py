"""`python -m zbcompile.inspect TARGET`: what zbcompile makes of a model, without running it."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbcompile.compiler import STAGE_PASSES
from zbcompile.errors import PipelineError
from zbcompile.inspect_commands import FORMATS, Request, run
from zbcompile.passes.errors import CompileError
from zbcompile.schedules import ScheduleError
from zbcompile.switches import SWITCHES

FAILED = 2
_EXPECTED = (PipelineError, CompileError, ScheduleError, OSError)
EXAMPLES = """examples:
  python -m zbcompile.inspect examples/targets.py:gpt
  python -m zbcompile.inspect examples/targets.py:gpt --schedule zb-h1 --ranks 4 --microbatches 8
  python -m zbcompile.inspect examples/targets.py:gpt --graph 1.B
  python -m zbcompile.inspect examples/targets.py:gpt --graphs graphs/ --format html
  python -m zbcompile.inspect examples/targets.py:gpt --diff split accumulate --stage 1
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --timeline step.svg
  python -m zbcompile.inspect examples/targets.py:gpt --compare 1f1b,zb-h1,zb-v --timeline compared.svg
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --explain-idle 2
  python -m zbcompile.inspect examples/targets.py:gpt --ranks 4 --critical-path
  python -m zbcompile.inspect mypackage.models:seventy_billion --fake --ranks 8 --json

TARGET is called without arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch.
docs/inspect.md explains every table and the fields of --json.
exit status: 0, or 2 with one line on standard error when the request cannot be met.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        run(Request(**vars(chosen)))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        return _fail(error, chosen.debug)
    return 0


def _fail(error: Exception, debug: bool) -> int:
    """One line on standard error (with `debug` the traceback); what no one foresaw says so."""
    if debug:
        traceback.print_exc()
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.filename:
        first = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, _EXPECTED):
        first = f"unexpected {type(error).__name__}: {first} (--debug shows where)"
    print(f"zbcompile.inspect: {first}", file=sys.stderr)
    return FAILED


class _Environment(argparse.Action):
    """Like --help: it needs nothing else and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        for switch in SWITCHES:
            print(f"{switch.name}=1  {switch.help}; now {'on' if switch.read() else 'off'}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zbcompile.inspect",
        description="Show how zbcompile cuts, splits and schedules a model. Runs no step, needs no GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    nothing = argparse.SUPPRESS  # as for --help, no value is left behind
    parser.add_argument("--env", action=_Environment, nargs=0, default=nothing, help="list the debug switches and end")
    _add_plan(parser.add_argument_group("what to compile"))
    _add_output(parser.add_argument_group("what to show (default: a summary)"))
    return parser


def _add_plan(group: Any) -> None:
    group.add_argument("--schedule", default="zb-v", help="a name, or a .csv, .json or .txt file (default: zb-v)")
    group.add_argument("--ranks", type=int, help="how many ranks (default: 2, or those of a schedule file)")
    group.add_argument("--microbatches", type=int, help="default: the smallest count from 2 x stages on")
    group.add_argument("--chunks", type=int, help="stages per rank, for the interleaved schedules")
    group.add_argument("--exact", action="store_true", help="the graphs of exact=True")
    group.add_argument(
        "--recompute",
        default="hints",
        metavar="none|hints|selective|full|BYTES",
        help="what B computes again (default: hints, the regions of torch.utils.checkpoint)",
    )
    group.add_argument(
        "--vocab",
        default="off",
        choices=("off", "auto", "1", "2"),
        help="shard the output layer over all ranks, with so many barriers (default: off)",
    )
    group.add_argument("--weight-recompute", action="store_true", help="W computes cheap values again to save memory")
    group.add_argument(
        "--balance",
        default="flops",
        metavar="flops|measured|parameters|NAME,NAME",
        help="what to make equal, or the modules to cut before (default: flops)",
    )
    group.add_argument("--boundary-bytes", type=int, help="the most bytes across a cut, per microbatch")
    group.add_argument("--memory", type=int, help="the most bytes on a rank")
    group.add_argument("--optimizer-state", type=float, default=2.0, help="bytes per parameter byte (default: 2)")
    group.add_argument("--loss-reduction", choices=("mean", "sum"), default="mean")
    group.add_argument("--fake", action="store_true", help="build the model without memory (CPU fake tensors)")
    group.add_argument(
        "--costs", default="flops", metavar="flops|uniform|FILE", help="times to predict with (default: flops)"
    )


def _add_output(group: Any) -> None:
    shown = group.add_mutually_exclusive_group()
    shown.add_argument("--graph", metavar="STAGE.PASS", help="one graph as Python, such as 1.B (passes F, B, W, BW)")
    shown.add_argument("--graphs", metavar="DIR", type=Path, help="write all graphs: Python files, or as --format says")
    shown.add_argument(
        "--diff",
        nargs=2,
        choices=STAGE_PASSES,
        metavar=("PASS", "PASS"),
        help=f"what changed between: {', '.join(STAGE_PASSES)}",
    )
    shown.add_argument("--compare", metavar="NAME,NAME", help="predict the step under several schedules")
    shown.add_argument(
        "--explain-idle", metavar="RANK", type=int, help="the longest idle intervals and what caused them"
    )
    shown.add_argument("--critical-path", action="store_true", help="the chain of actions that makes the step's length")
    group.add_argument(
        "--timeline",
        metavar="FILE",
        type=Path,
        help="draw the step, or those compared: .txt, .svg, .html, .json (Chrome)",
    )
    group.add_argument("--stage", type=int, metavar="N", help="the stage of --diff (default: the first)")
    group.add_argument("--format", choices=FORMATS, default="text", help="of --graph and --graphs (default: text)")
    group.add_argument("--json", action="store_true", help="the summary, or the comparison, as JSON")
    group.add_argument("--debug", action="store_true", help="errors with their traceback")


if __name__ == "__main__":
    sys.exit(main())
