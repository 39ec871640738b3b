"""The inspect command: what zbcompile would compile a model to, without running it."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from zbcompile.cli.command_line import split_options
from zbcompile.inspection.compared_schedules import compare, compared_names
from zbcompile.inspection.graphs import (
    PassLog,
    graph_table,
    pass_table,
    require_stage,
    stage_and_pass,
    write_graphs,
)
from zbcompile.inspection.idle_report import critical_table
from zbcompile.inspection.report import Summary
from zbcompile.inspection.request import SCHEMA, Request, Subject, compile_for
from zbcompile.progress import Say
from zbcompile.schedules import Timeline, write_comparison, write_picture
from zbcompile.tables import Figure, Table, to_data, to_text


def run(chosen: argparse.Namespace, say: Say) -> None:
    """Print the requested tables, or the summary."""
    request = Request(**split_options(chosen), say=say)
    subject = Subject(request)
    asked = [part for name, part in PARTS.items() if getattr(request, name) not in (None, False)]
    tables = [table for part in _checked(subject, asked) for table in part(subject)]
    print(
        json.dumps({"schema": SCHEMA, **to_data(tables)}, indent=1)
        if request.json
        else to_text(tables).rstrip("\n")
    )


Part = Callable[[Subject], Iterator[Table]]


def _checked(subject: Subject, asked: list[Part]) -> list[Part]:
    """What is shown. Raises PipelineError, before anything is compiled, for what the schedule or a
    directory lacks."""
    request = subject.request
    needing = [f"--{name}" for name in ("passes", "compare") if getattr(request, name)]
    subject.require_model([*request.changed, *needing])
    compared_names(request)
    if request.graph:
        require_stage(subject.schedule, stage_and_pass(request.graph)[0])
    return [*([] if subject.record is None else [_measured]), *asked] or [_summary]


def _graph(subject: Subject) -> Iterator[Table]:
    yield graph_table(subject.inspected, *stage_and_pass(subject.request.graph or ""))


def _files(paths: list[Path]) -> Table:
    return Table(
        "files",
        rows=[[Figure("file", str(path))] for path in paths],
        picture="\n".join(map(str, paths)),
    )


def _graphs(subject: Subject) -> Iterator[Table]:
    assert subject.request.graphs is not None
    yield _files(write_graphs(subject.inspected, subject.request.graphs))


def _passes(subject: Subject) -> Iterator[Table]:
    log = PassLog()
    compile_for(subject.example, subject.schedule, subject.request, log)
    yield pass_table(log)


def _compare(subject: Subject) -> Iterator[Table]:
    table, steps = compare(subject)
    yield table
    if file := subject.request.timeline:
        shown = [step.shown for step in steps]
        yield _files([write_comparison(shown, file)])


def _step(subject: Subject) -> tuple[Timeline, str]:
    """The recorded step, or the predicted one, and its unit."""
    if subject.comparison is not None:
        return subject.comparison.measured, "s"
    return subject.prediction.shown, subject.prediction.unit


def _critical_path(subject: Subject) -> Iterator[Table]:
    step, unit = _step(subject)
    yield critical_table(step, unit)


def _timeline(subject: Subject) -> Iterator[Table]:
    """The timelines to draw: the step, for a recorded one also its prediction. Those of --compare
    are drawn there."""
    file, compared = subject.request.timeline, subject.comparison
    assert file is not None
    if subject.request.compare:
        return
    if compared is None:
        yield _files([write_picture(subject.prediction.for_file(file), file)])
    elif file.suffix == ".json":
        yield _files([write_picture(compared.measured, file)])
    else:
        yield _files([write_comparison([compared.predicted, compared.measured], file)])


def _measured(subject: Subject) -> Iterator[Table]:
    assert subject.comparison is not None
    yield from subject.comparison.tables()


def _summary(subject: Subject) -> Iterator[Table]:
    yield from Summary(subject.inspected, subject.prediction).tables()


PARTS: dict[str, Part] = {
    "graph": _graph,
    "graphs": _graphs,
    "passes": _passes,
    "compare": _compare,
    "critical_path": _critical_path,
    "timeline": _timeline,
}
