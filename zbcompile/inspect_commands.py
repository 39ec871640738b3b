"""What the inspect command line can do: summary, graphs as Python, timelines and their causes, comparison."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zbcompile.causes import format_critical_path, format_idle_intervals
from zbcompile.command_plan import RANKS, Plan, compiled, example_of, schedule_of
from zbcompile.compiler import Observer
from zbcompile.errors import PipelineError
from zbcompile.example import Example
from zbcompile.graph_data import PASSES, graph_of
from zbcompile.graph_dot import to_dot
from zbcompile.graph_page import to_page
from zbcompile.inspected import Inspected, read_saved
from zbcompile.pass_history import PassHistory
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.printing import print_piece
from zbcompile.prediction import Basis, basis_of, left_on_last, predict
from zbcompile.program import StepOptions
from zbcompile.program_files import MANIFEST
from zbcompile.program_manifest import SavedProgram
from zbcompile.report import Compared, format_comparison, format_summary
from zbcompile.schedules import Costs, Schedule, ScheduleError, lower, simulate, smallest_microbatches
from zbcompile.schedules.pictures import ENDINGS, write_comparison, write_picture
from zbcompile.schedules.placement import Placement
from zbcompile.schedules.timeline import Timeline
from zbcompile.summary import SCHEMA, Unsharded, prediction_of, summarise

FORMATS = ("text", "json", "dot", "html")


@dataclass(frozen=True)
class Request(Plan):
    """The arguments of the command line; `python -m zbcompile.inspect --help` explains them."""

    costs: str
    graph: str | None
    graphs: Path | None
    diff: list[str] | None
    stage: int | None
    compare: str | None
    explain_idle: int | None
    critical_path: bool
    timeline: Path | None
    format: str
    json: bool


def run(request: Request) -> None:
    """Do what is asked and print the result; raises the project's errors and OSError."""
    _refuse_combinations(request)
    chosen = None if request.graph is None else _stage_and_pass(request.graph)
    if request.graphs:  # a wrong path is known before a long compilation
        request.graphs.mkdir(parents=True, exist_ok=True)
    if request.timeline and request.timeline.suffix not in ENDINGS:
        raise PipelineError(f"--timeline {request.timeline}: expected a file that ends in {', '.join(ENDINGS)}.")
    if (Path(request.target) / MANIFEST).exists():
        _show(_saved(request), request, chosen, None)
    elif request.compare:
        _compare(example_of(request), request)
    else:
        history = PassHistory() if request.diff else None
        schedule = schedule_of(request, request.schedule_name)
        _show(_compiled(example_of(request), schedule, request, history), request, chosen, history)


def _show(inspected: Inspected, request: Request, chosen: tuple[int, str] | None, history: PassHistory | None) -> None:
    """What is asked for of one program; `chosen` is the stage and pass of `--graph`."""
    if history is not None:
        print(_difference(inspected, history, request), end="")
    elif chosen:
        print(_graph(inspected, *chosen, request.format), end="")
    elif request.graphs:
        _write_graphs(inspected, request.graphs, request.format)
    elif request.explain_idle is not None or request.critical_path:
        print(_causes(inspected, request), end="")
    elif request.timeline:
        print(write_picture(_predicted(inspected, request)[0], request.timeline))
    else:
        _show_summary(inspected, request)


def _refuse_combinations(request: Request) -> None:
    causes = request.explain_idle is not None or request.critical_path or request.diff
    if request.stage is not None and not request.diff:
        raise PipelineError("--stage says which stage --diff shows; for one graph ask for --graph STAGE.PASS.")
    if request.json and (request.graph or request.graphs or request.timeline or causes):
        raise PipelineError("--json writes the summary or the comparison; leave it out, or leave the other out.")
    if request.format != "text" and not (request.graph or request.graphs):
        raise PipelineError(f"--format {request.format} is for --graph or --graphs; the summary has --json.")
    if request.format == "html" and request.graph:
        raise PipelineError("--format html shows all graphs on one page; ask for it with --graphs DIR.")
    if request.timeline and (request.graph or request.graphs or causes):
        raise PipelineError("--timeline draws the step, or with --compare several; leave it out, or the other.")


def _compiled(example: Example, schedule: Schedule, request: Request, observe: Observer | None = None) -> Inspected:
    if sys.stderr.isatty():
        print(f"zbcompile.inspect: compiling for {schedule.name}, {schedule.stages} stages ...", file=sys.stderr)
    found = compiled(example, schedule, request, observe)
    return replace(found, program=replace(found.program, step=StepOptions(request.loss_reduction)))


def _saved(request: Request) -> Inspected:
    """The program in a directory, whose model is not here: what needs that is refused."""
    needing = [f"--{name}" for name in ("diff", "compare") if getattr(request, name)]
    if request.changed or needing:
        options = ", ".join([*request.changed, *needing])
        raise PipelineError(
            f"{request.target} is a program, compiled already: {options} needs its model. Leave it out, or inspect the "
            "function that makes the model."
        )
    return read_saved(Path(request.target))


def _unsharded(inspected: Inspected, request: Request, costs: Costs) -> Unsharded:
    """The predicted step with the output layer on the last stage."""
    program = inspected.program
    if program.vocabulary is None or isinstance(program, SavedProgram):
        return Unsharded()
    plain = replace(request, vocab="off", microbatches=program.schedule.microbatches)
    schedule = schedule_of(plain, request.schedule_name)
    if schedule.shards:  # a schedule file with vocabulary passes of its own has no form without
        return Unsharded()
    redistributed = _predicted(_compiled(inspected.example, schedule, plain), plain)[0].makespan
    return Unsharded(simulate(schedule, left_on_last(costs)).makespan, redistributed)


def _show_summary(inspected: Inspected, request: Request) -> None:
    timeline, basis = _predicted(inspected, request)
    reduction = inspected.program.step.loss_reduction
    summary = summarise(inspected, basis, timeline, reduction, _unsharded(inspected, request, basis.costs))
    if request.json:
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        print(format_summary(summary, timeline), end="")


def _predicted(inspected: Inspected, request: Request) -> tuple[Timeline, Basis]:
    basis = basis_of(inspected.program, request.costs)
    return predict(inspected.program, basis.costs), basis


def _causes(inspected: Inspected, request: Request) -> str:
    timeline, basis = _predicted(inspected, request)
    if request.critical_path:
        return format_critical_path(timeline, basis.unit)
    return format_idle_intervals(timeline, request.explain_idle or 0, basis.unit)


def _stage_and_pass(text: str) -> tuple[int, str]:
    stage, _, name = text.partition(".")
    if not stage.isdecimal() or name.upper() not in PASSES:
        raise PipelineError(
            f"--graph {text}: expected STAGE.PASS such as 1.B, with one of the passes {', '.join(PASSES)}."
        )
    return int(stage), name.upper()


def _difference(inspected: Inspected, history: PassHistory, request: Request) -> str:
    """What the passes between two of them changed. A stage that was not compiled itself has another one's graphs."""
    assert request.diff is not None
    stage = request.stage or 0
    _require_stage(inspected, stage)
    return history.difference(inspected.program.stages[stage].original, *request.diff)


def _require_stage(inspected: Inspected, stage: int) -> None:
    program = inspected.program
    if not 0 <= stage < len(program.stages):
        raise PipelineError(
            f"there is no stage {stage}: {program.schedule.name} on {program.schedule.ranks} ranks has stages 0 to "
            f"{len(program.stages) - 1}."
        )


def _printed(inspected: Inspected, stage: int, name: str) -> str:
    """One graph as Python."""
    program = inspected.program
    _require_stage(inspected, stage)
    flops = program.stages[stage].flops[name]
    title = f"{name} of stage {stage} of {type(inspected.example.model).__name__}: {flops:,} FLOPs for one microbatch."
    return print_piece(program.stages[stage].pieces[name], title)


def _graph(inspected: Inspected, stage: int, name: str, form: str) -> str:
    """One graph in the form that was asked for."""
    text = _printed(inspected, stage, name)
    if form == "text":
        return text
    graph = graph_of(inspected.program, stage, name)
    return to_dot(graph) if form == "dot" else json.dumps(graph.to_dict(), indent=1) + "\n"


def _write_graphs(inspected: Inspected, directory: Path, form: str) -> None:
    if form == "html":
        page = directory / "graphs.html"
        page.write_text(to_page(inspected.program, type(inspected.example.model).__name__), encoding="utf-8")
        print(page)
        return
    for stage in range(len(inspected.program.stages)):
        for name in PASSES:
            path = directory / f"stage{stage}_{name}.{'py' if form == 'text' else form}"
            path.write_text(_graph(inspected, stage, name, form), encoding="utf-8")
            print(path)


def _compare(example: Example, request: Request) -> None:
    """Compile once per placement, since a schedule changes the graphs by nothing else, and predict each schedule."""
    names = [name.strip() for name in (request.compare or "").split(",") if name.strip()]
    request = replace(request, microbatches=request.microbatches or _common_microbatches(names, request))
    by_placement: dict[Placement, Inspected] = {}
    drawn: list[Timeline] = []
    compared = [_compared(example, request, name, by_placement, drawn) for name in names]
    if not any(line.prediction for line in compared):
        raise PipelineError(
            "; ".join(f"{line.schedule}: {line.reason}" for line in compared) or "--compare names nothing"
        )
    if request.json:
        print(json.dumps({"schema": SCHEMA, "compared": [asdict(line) for line in compared]}, indent=1))
    else:
        print(format_comparison(compared), end="")
    if request.timeline:
        print(write_comparison(drawn, request.timeline))


def _common_microbatches(names: Sequence[str], request: Request) -> int:
    """A count that the schedules admit: steps of equal work are compared."""
    ranks, counts = request.ranks or RANKS, [4 * (request.ranks or RANKS)]
    for name in names:
        with contextlib.suppress(ScheduleError):  # what is wrong with this one is said in its line
            counts.append(smallest_microbatches(name, ranks, at_least=max(counts)))
    return max(counts)


def _compared(
    example: Example, request: Request, name: str, by_placement: dict[Placement, Inspected], drawn: list[Timeline]
) -> Compared:
    """One line of the comparison; its timeline is added to `drawn`."""
    try:
        schedule = schedule_of(request, name)
        if schedule.placement not in by_placement:
            by_placement[schedule.placement] = _compiled(example, schedule, request)
    except (PipelineError, PartitionError, ScheduleError) as error:
        return Compared(name, 0, request.microbatches or 0, None, str(error).splitlines()[0])
    program = replace(by_placement[schedule.placement].program, lowered=lower(schedule))
    basis = basis_of(program, request.costs)
    drawn.append(predict(program, basis.costs))
    prediction = prediction_of(program, basis, drawn[-1])
    return Compared(schedule.name, schedule.stages, schedule.microbatches, prediction)
