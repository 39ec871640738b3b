"""The inspect command: what zbcompile would compile a model to, without running it."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zbcompile.cli.command_line import Command, split_options
from zbcompile.cli.compile_arguments import add_division, add_plan
from zbcompile.env import VARIABLES
from zbcompile.inspection.compared_schedules import compare, compared_names
from zbcompile.inspection.graphs import (
    PassLog,
    graph_table,
    merge_pairs,
    pass_table,
    require_stage,
    stage_and_pass,
    write_graphs,
)
from zbcompile.inspection.idle_report import critical_table, exchanges, idle_intervals, require_rank
from zbcompile.inspection.report import Summary
from zbcompile.inspection.request import SCHEMA, Request, Subject, compile_for
from zbcompile.passes.partition.memory_estimate import ReplicaSharding
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.progress import Say
from zbcompile.schedules import Timeline, write_comparison, write_picture
from zbcompile.schedules.visualization.units import for_trace, in_units
from zbcompile.tables import Figure, Table, to_data, to_text

EXAMPLES = """examples:
  python -m zbcompile.inspect examples/targets.py:gpt
  python -m zbcompile.inspect examples/targets.py:gpt --schedule zb-h1 --ranks 4 --microbatches 8
  python -m zbcompile.inspect examples/targets.py:gpt --graph 1.B
  python -m zbcompile.inspect examples/targets.py:gpt --graphs graphs/
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
    """Print the requested tables, or the summary."""
    request = Request(**split_options(chosen), say=say)
    subject = Subject(request)
    asked = [part for name, part in PARTS.items() if getattr(request, name) not in (None, False)]
    tables = [table for part in _checked(subject, asked) for table in part(subject)]
    print(json.dumps({"schema": SCHEMA, **to_data(tables)}, indent=1) if request.json else to_text(tables).rstrip("\n"))


Part = Callable[[Subject], Iterator[Table]]


def _checked(subject: Subject, asked: list[Part]) -> list[Part]:
    """What is shown. Raises PipelineError, before anything is compiled, for what the schedule or a directory lacks."""
    request = subject.request
    needing = [f"--{name}" for name in ("passes", "compare") if getattr(request, name)]
    subject.require_model([*request.changed, *needing])
    compared_names(request)
    if request.graph:
        require_stage(subject.schedule, stage_and_pass(request.graph)[0])
    if request.explain_idle is not None:
        require_rank(subject.schedule, request.explain_idle)
    return [*([] if subject.record is None else [_measured]), *asked] or [_summary]


def _graph(subject: Subject) -> Iterator[Table]:
    yield graph_table(subject.inspected, *stage_and_pass(subject.request.graph or ""))


def _files(paths: list[Path]) -> Table:
    return Table("files", rows=[[Figure("file", str(path))] for path in paths], picture="\n".join(map(str, paths)))


def _graphs(subject: Subject) -> Iterator[Table]:
    assert subject.request.graphs is not None
    yield _files(write_graphs(subject.inspected, subject.request.graphs))


def _passes(subject: Subject) -> Iterator[Table]:
    log = PassLog()
    compiled = compile_for(subject.example, subject.schedule, subject.request, log)
    merge_pairs(compiled.program, PassManager(log))
    yield pass_table(log)


def _compare(subject: Subject) -> Iterator[Table]:
    table, steps = compare(subject)
    yield table
    if file := subject.request.timeline:
        shown = [step.shown for step in steps]
        yield _files([write_comparison(in_units(shown) if steps[0].basis.unit == "s" else shown, file)])


def _step(subject: Subject) -> tuple[Timeline, str]:
    """The recorded step, or the predicted one, and its unit."""
    if subject.comparison is not None:
        return subject.comparison.measured, "s"
    return subject.prediction.shown, subject.prediction.unit


def _explain_idle(subject: Subject) -> Iterator[Table]:
    rank, (step, unit) = subject.request.explain_idle or 0, _step(subject)
    yield idle_intervals(step, rank, unit)
    if subject.record is None:
        yield exchanges(subject.inspected.program, step, rank, unit)


def _critical_path(subject: Subject) -> Iterator[Table]:
    step, unit = _step(subject)
    yield critical_table(step, unit)


def _timeline(subject: Subject) -> Iterator[Table]:
    """The timelines to draw: the step, for a recorded one also its prediction. Those of --compare are drawn there."""
    file, compared = subject.request.timeline, subject.comparison
    assert file is not None
    if subject.request.compare:
        return
    if compared is None:
        yield _files([write_picture(subject.prediction.for_file(file), file)])
    elif file.suffix == ".json":
        yield _files([write_picture(for_trace(compared.measured), file)])
    else:
        yield _files([write_comparison(in_units([compared.predicted, compared.measured]), file)])


def _sharding(request: Request) -> ReplicaSharding:
    return ReplicaSharding(request.replicas, request.zero, request.reshard)


def _measured(subject: Subject) -> Iterator[Table]:
    assert subject.comparison is not None
    yield from subject.comparison.tables()


def _summary(subject: Subject) -> Iterator[Table]:
    yield from Summary(subject.inspected, subject.prediction, _sharding(subject.request)).tables()


PARTS: dict[str, Part] = {
    "graph": _graph,
    "graphs": _graphs,
    "passes": _passes,
    "compare": _compare,
    "explain_idle": _explain_idle,
    "critical_path": _critical_path,
    "timeline": _timeline,
}


class _Environment(argparse.Action):
    """An action like --help, which needs no other argument and ends the command."""

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
    add_division(add)
    _add_output(parser.add_argument_group("what to show, one after the other (default: a summary)"))


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--graph", metavar="STAGE.PASS", help="one graph as torch.fx prints it, such as 1.B (passes F, B, W, BW)")
    add("--graphs", metavar="DIR", type=Path, help="write all graphs, each as torch.fx prints it")
    add("--passes", action="store_true", help="the passes of the compiler in order: operations, seconds")
    add("--compare", metavar="NAME,NAME", help="predict the step under several schedules, of the same microbatches")
    add("--explain-idle", metavar="RANK", type=int, help="the longest idle intervals and what caused them")
    add("--critical-path", action="store_true", help="the chain of actions that sets the step's length")
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


DESCRIPTION = "Show how zbcompile cuts, splits and schedules a model. Runs no step, needs no GPU."
main = Command("inspect", DESCRIPTION, EXAMPLES, _add_arguments, _run)
