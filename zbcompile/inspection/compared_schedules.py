"""`--compare`: the predicted step under several schedules."""

import contextlib
from collections.abc import Sequence

from zbcompile.batches.example import Example
from zbcompile.cli.compile_arguments import RANKS, schedule_of, with_options
from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.errors import PipelineError
from zbcompile.inspection.request import Prediction, Request, Subject, compile_for, predicted
from zbcompile.options import is_searched
from zbcompile.passes.errors import PartitionError
from zbcompile.prediction.predict import Basis, count_messages
from zbcompile.program.program import Program
from zbcompile.schedules import Placement, ScheduleError, smallest_microbatches
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES
from zbcompile.schedules.visualization.step_tables import idle_share
from zbcompile.tables import Figure, Table


def compare(subject: Subject) -> tuple[Table, list[Prediction]]:
    """Compile once per placement, since nothing else of a schedule changes the graphs, and predict
    each schedule."""
    request = subject.request
    names = compared_names(request)
    counted = with_options(
        request, microbatches=request.options.microbatches or _common_microbatches(names, request)
    )
    comparison, rows, steps, notes = _Comparison(subject.example), [], [], []
    for name in names:
        try:
            program, step = comparison.step(with_options(counted, schedule=name))
        except (PipelineError, PartitionError, ScheduleError) as error:
            reason = str(error).splitlines()[0]
            notes.append(reason if reason.startswith(name) else f"{name}: {reason}")
            continue
        steps.append(step)
        rows.append(_row(program, step))
    if not rows:
        raise PipelineError("; ".join(notes) or "--compare names nothing")
    bases = sorted({step.basis.text for step in steps})
    return Table("compared", f"Predicted {', '.join(bases)}; one step", rows, notes), steps


def compared_names(request: Request) -> list[str]:
    """The schedules that `--compare` names. Raises ScheduleError for one that does not exist; one
    that these ranks or microbatches do not admit stands below the table, with the reason."""
    names = [name.strip() for name in (request.compare or "").split(",") if name.strip()]
    for name in names:
        name.endswith(ENDS_OF_SCHEDULES) or find(name)
    return names


def _common_microbatches(names: Sequence[str], request: Request) -> int:
    """A number of microbatches that all schedules admit, so that steps of equal work are
    compared."""
    ranks, counts = request.options.ranks or RANKS, [4 * (request.options.ranks or RANKS)]
    for name in names:
        with contextlib.suppress(
            ScheduleError
        ):  # the error of this one is reported below the table
            counts.append(smallest_microbatches(name, ranks, at_least=max(counts)))
    return max(counts)


class _Comparison:
    """The programs and costs by placement, so that each graph is compiled and measured once."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self._compiled: dict[Placement, CompiledExample] = {}
        self._bases: dict[Placement, Basis] = {}

    def step(self, request: Request) -> tuple[Program, Prediction]:
        schedule = schedule_of(request)
        if is_searched(request.options):  # its cuts are its own
            program = compile_for(self._example, schedule, request).program
            return program, predicted(program, request)
        placement = schedule.placement
        if placement not in self._compiled:
            self._compiled[placement] = compile_for(self._example, schedule, request)
        program = in_order(self._compiled[placement].program, schedule)
        found = predicted(program, request, self._bases.get(placement))
        self._bases[placement] = found.basis
        return program, found


def _row(program: Program, step: Prediction) -> list[Figure]:
    schedule, sent = program.schedule, count_messages(program)
    return [
        Figure("schedule", schedule.name),
        Figure("stages", schedule.stages),
        Figure("microbatches", schedule.microbatches),
        Figure("step", step.shown.makespan, step.unit, "step"),
        Figure("bubble", step.timeline.bubble, "share", "step"),
        Figure("idle of all ranks", idle_share(step.timeline), "share", "step"),
        Figure("peak waiting", int(max(step.timeline.peak_memory)), "B", "rank"),
        Figure("messages", sent.count, "", "step"),
        Figure("sent", sent.bytes, "B", "step"),
    ]
