"""The commands of the inspect command line: summary, graphs as Python, timelines and their causes, comparison."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zbcompile.amounts import format_share, format_time
from zbcompile.cli.compile_arguments import RANKS, example_of, quiet, schedule_of, with_options
from zbcompile.compiler.compile_example import Inspected, read_saved
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.compiler.pass_history import PassHistory
from zbcompile.errors import PipelineError
from zbcompile.inspection.graphs import difference, graph_text, merge_pairs, pass_table, stage_and_pass, write_graphs
from zbcompile.inspection.idle_report import format_critical_path, format_exchanges, format_idle_intervals, format_slack
from zbcompile.inspection.report import format_summary, table, wrap
from zbcompile.inspection.request import (
    Request,
    compile_for,
    predicted,
    refuse_combinations,
    refuse_files,
    refuse_places,
)
from zbcompile.inspection.step_comparison_report import comparison_to_dict, format_step_comparison
from zbcompile.inspection.summary import SCHEMA, Prediction, Tried, prediction_of, summarise
from zbcompile.model.example import Example
from zbcompile.options import is_searched
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.prediction.advice import Peak
from zbcompile.prediction.predict import Basis, basis_of, left_on_last
from zbcompile.prediction.rank_memory import Sharding, complete_peak
from zbcompile.prediction.recompile_trials import Impossible, run_trials
from zbcompile.prediction.step_comparison import compare_step, measured_timeline, require_same_schedule
from zbcompile.program.manifest import SavedProgram
from zbcompile.program.program import Program
from zbcompile.program.rank_files import MANIFEST
from zbcompile.program.step_record import StepRecord, read_record
from zbcompile.schedules import (
    Costs,
    Placement,
    ScheduleError,
    Timeline,
    simulate,
    smallest_microbatches,
    write_comparison,
    write_picture,
)
from zbcompile.schedules.visualization.units import for_trace, in_units

MANY_OPERATIONS = 2500  # above this, a model is recompiled only on request: it takes several minutes on a laptop


def run(request: Request) -> None:
    """Carry out the request and print the result; raises the project's errors and OSError."""
    refuse_combinations(request)
    refuse_files(request)
    chosen = None if request.graph is None else stage_and_pass(request.graph)
    record = read_record(request.measured) if request.measured else None
    if (Path(request.target) / MANIFEST).exists():
        inspected = _saved(request)
        _show(inspected, request, chosen, None) if record is None else show_measured(inspected, record, request)
    elif record is not None:
        schedule = schedule_of(request, None if "schedule" in request.given else record.schedule)
        show_measured(compile_for(example_of(request), schedule, request), record, request)
    elif request.compare:
        compare(example_of(request), request)
    else:
        history = PassHistory(texts=bool(request.diff)) if request.diff or request.passes else None
        schedule = schedule_of(request)
        refuse_places(request, schedule, chosen)
        _show(compile_for(example_of(request), schedule, request, history), request, chosen, history)


def _show(inspected: Inspected, request: Request, chosen: tuple[int, str] | None, history: PassHistory | None) -> None:
    """Print what was requested of one program; `chosen` is the stage and pass of `--graph`."""
    if history is not None:
        merge_pairs(inspected.program, PassManager(history))
        print(pass_table(history, request.json) if request.passes else difference(inspected, history, request), end="")
    elif chosen:
        print(graph_text(inspected, *chosen, request.format), end="")
    elif request.graphs:
        write_graphs(inspected, request.graphs, request.format)
    elif request.explain_idle is not None or request.critical_path:
        print(_causes(inspected, request), end="")
    elif request.timeline:
        print(write_picture(_for_picture(*predicted(inspected, request), request.timeline), request.timeline))
    else:
        _show_summary(inspected, request)


def _for_picture(timeline: Timeline, basis: Basis, file: Path) -> Timeline:
    """The timeline in the units of its picture."""
    if basis.unit != "s":
        return timeline
    return for_trace(timeline) if file.suffix == ".json" else in_units([timeline])[0]


def _saved(request: Request) -> Inspected:
    """The program in a directory. Refuses requests that need its model, which is not available."""
    needing = [f"--{name}" for name in ("diff", "passes", "compare") if getattr(request, name)]
    if request.changed or needing:
        options = ", ".join([*request.changed, *needing])
        raise PipelineError(
            f"{request.target} is a compiled program: {options} needs its model. Leave it out, or inspect the "
            "function that makes the model."
        )
    return read_saved(Path(request.target))


def _unsharded(inspected: Inspected, request: Request, costs: Costs) -> tuple[float | None, float | None]:
    """The predicted step with the output layer on the last stage, see `Tried`."""
    program = inspected.program
    if program.vocabulary is None or isinstance(program, SavedProgram):
        return None, None
    plain = with_options(request, vocab="off", microbatches=program.schedule.microbatches)
    schedule = schedule_of(plain)
    if schedule.shards:  # a schedule file that contains vocabulary passes has no form without them
        return None, None
    redistributed = predicted(compile_for(inspected.example, schedule, plain), plain)[0].makespan
    return simulate(schedule, left_on_last(costs)).makespan, redistributed


def _show_summary(inspected: Inspected, request: Request) -> None:
    timeline, basis = predicted(inspected, request)
    sharding = Sharding(request.replicas, request.zero)
    reduction = inspected.program.step.loss_reduction
    summary = summarise(inspected, basis, timeline, reduction, _tried(inspected, request, basis), sharding)
    if request.json:
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        print(format_summary(summary, timeline), end="")


def _tried(inspected: Inspected, request: Request, basis: Basis) -> Tried:
    """The other graphs that the model could be compiled to. Equal times for all passes would say nothing about them."""
    unsharded = _unsharded(inspected, request, basis.costs)
    if request.quick or basis.unit != "s":
        return Tried(*unsharded)
    reason = ""
    if inspected.drawn is None:
        reason = "they need the model, which is not here; inspect the function that makes it"
    elif (operations := len(inspected.drawn.line.nodes)) > MANY_OPERATIONS and not request.thorough:
        reason = f"the model has {operations:,} operations, so this takes minutes; --thorough does it"
    if reason:
        return Tried(*unsharded, impossible=(Impossible("--recompute, --vocab, other cuts", reason),))
    model, sharding = inspected.example.model, Sharding(request.replicas, request.zero)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def peak_of(program: Program | None) -> Peak:
        return complete_peak(program or inspected.program, tensors, sharding)

    with quiet(request):
        return Tried(*unsharded, *run_trials(inspected, basis.costs, request.say, peak_of, request.fused))


def _causes(inspected: Inspected, request: Request) -> str:
    timeline, basis = predicted(inspected, request)
    if request.critical_path:
        return format_critical_path(timeline, basis.unit) + format_slack(timeline, basis.unit)
    rank = request.explain_idle or 0
    exchanges = format_exchanges(inspected.program, timeline, rank, basis.unit)
    return format_idle_intervals(timeline, rank, basis.unit) + exchanges


def show_measured(inspected: Inspected, record: StepRecord, request: Request) -> None:
    """Print, or draw, what was asked for of a recorded step of `inspected`."""
    require_same_schedule(record.schedule, inspected.program.schedule)
    expected, basis = predicted(inspected, request)
    measured = measured_timeline(record, expected.costs)
    if request.explain_idle is not None:
        print(format_idle_intervals(measured, request.explain_idle, "s"), end="")
        return
    if request.critical_path:
        print(format_critical_path(measured, "s"), end="")
        return
    if request.timeline and request.timeline.suffix == ".json":
        print(write_picture(for_trace(measured), request.timeline))
    elif request.timeline:
        print(write_comparison(in_units([expected, measured]), request.timeline))
    else:
        comparison = compare_step(record, expected, basis, inspected.program.manifest)
        if request.json:
            print(json.dumps(comparison_to_dict(comparison), indent=1))
        else:
            print(format_step_comparison(comparison, expected, measured), end="")


@dataclass(frozen=True)
class Compared:
    """One line of `--compare`: a prediction, or the reason why there is none."""

    schedule: str
    stages: int
    microbatches: int
    prediction: Prediction | None
    reason: str = ""


def compare(example: Example, request: Request) -> None:
    """Compile once per placement, since nothing else of a schedule changes the graphs, and predict each schedule."""
    names = [name.strip() for name in (request.compare or "").split(",") if name.strip()]
    request = with_options(request, microbatches=request.options.microbatches or _common_microbatches(names, request))
    by_placement: dict[Placement, Inspected] = {}
    bases: dict[Placement, Basis] = {}
    drawn: list[Timeline] = []
    compared = [_compared(example, request, name, by_placement, bases, drawn) for name in names]
    if not any(line.prediction for line in compared):
        raise PipelineError("; ".join(map(_reason, compared)) or "--compare names nothing")
    if request.json:
        print(json.dumps({"schema": SCHEMA, "compared": [asdict(line) for line in compared]}, indent=1))
    else:
        print(_format_table(compared), end="")
    if request.timeline:
        print(write_comparison(drawn if request.costs == "uniform" else in_units(drawn), request.timeline))


def _common_microbatches(names: Sequence[str], request: Request) -> int:
    """A count that the schedules admit: steps of equal work are compared."""
    ranks, counts = request.options.ranks or RANKS, [4 * (request.options.ranks or RANKS)]
    for name in names:
        with contextlib.suppress(ScheduleError):  # the error of this one is reported in its line
            counts.append(smallest_microbatches(name, ranks, at_least=max(counts)))
    return max(counts)


def _compared(
    example: Example,
    request: Request,
    name: str,
    by_placement: dict[Placement, Inspected],
    bases: dict[Placement, Basis],
    drawn: list[Timeline],
) -> Compared:
    """One line of the comparison; its timeline is added to `drawn`."""
    try:
        request = with_options(request, schedule=name)
        program = _compiled(example, request, by_placement)
    except (PipelineError, PartitionError, ScheduleError) as error:
        return Compared(name, 0, request.options.microbatches or 0, None, str(error).splitlines()[0])
    schedule = program.schedule
    if schedule.placement not in bases or is_searched(request.options):  # graphs are measured once
        bases[schedule.placement] = basis_of(program, request.costs, request.fused)
    basis = bases[schedule.placement]
    drawn.append(simulate(schedule, basis.costs))
    prediction = prediction_of(program, basis, drawn[-1])
    return Compared(schedule.name, schedule.stages, schedule.microbatches, prediction)


def _compiled(example: Example, request: Request, by_placement: dict[Placement, Inspected]) -> Program:
    schedule = schedule_of(request)
    if is_searched(request.options):  # its cuts are its own
        return compile_for(example, schedule, request).program
    if schedule.placement not in by_placement:
        by_placement[schedule.placement] = compile_for(example, schedule, request)
    return in_order(by_placement[schedule.placement].program, schedule)


def _format_table(compared: Sequence[Compared]) -> str:
    headers = ["schedule", "stages", "microbatches", "step", "bubble", "peak waiting", "messages", "sent"]
    rows = [_cells(line, line.prediction) for line in compared if line.prediction]
    rows_text = table(rows, headers, left=("schedule",)) if rows else ""
    left_out = [line for c in compared if not c.prediction for line in wrap(_reason(c))]
    bases = {c.prediction.basis for c in compared if c.prediction}
    title = f"Predicted {', '.join(sorted(bases))}; one step, on the busiest rank" if bases else ""
    return "\n\n".join(part for part in (title, rows_text, "\n".join(left_out)) if part) + "\n"


def _reason(line: Compared) -> str:
    return line.reason if line.reason.startswith(line.schedule) else f"{line.schedule}: {line.reason}"


def _cells(line: Compared, p: Prediction) -> list[str]:
    return [
        line.schedule,
        str(line.stages),
        str(line.microbatches),
        format_time(p.step, p.unit),
        format_share(p.bubble),
        format_bytes(p.peak_bytes),
        str(p.messages.count),
        format_bytes(p.messages.bytes),
    ]
