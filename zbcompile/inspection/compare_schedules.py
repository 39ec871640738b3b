"""`--compare`: the step under several schedules."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zbcompile.amounts import format_share, format_time
from zbcompile.cli.compile_arguments import RANKS, schedule_of, with_options
from zbcompile.compiler.compile_example import Inspected
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.errors import PipelineError
from zbcompile.frontend.options import is_searched
from zbcompile.inspection.report import table, wrap
from zbcompile.inspection.request import Request, compile_for
from zbcompile.inspection.summary import SCHEMA, Prediction, prediction_of
from zbcompile.model.example import Example
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.prediction.predict import Basis, basis_of
from zbcompile.program.program import Program
from zbcompile.schedules import (
    Placement,
    ScheduleError,
    Timeline,
    simulate,
    smallest_microbatches,
    write_comparison,
)
from zbcompile.schedules.visualization.units import in_units


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
