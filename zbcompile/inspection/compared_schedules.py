"""`--compare`: the predicted step under several schedules."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zbcompile.cli.compile_arguments import RANKS, schedule_of
from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.errors import PipelineError
from zbcompile.options import is_searched
from zbcompile.passes.errors import PartitionError
from zbcompile.prediction.predict import CostSource, count_messages, load_costs
from zbcompile.program.program import Program
from zbcompile.schedules import Placement, ScheduleError, Timeline, simulate, smallest_microbatches
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.files import ENDS_OF_SCHEDULES
from zbcompile.schedules.visualization.step_tables import idle_share
from zbcompile.tables import Figure, Table


def compared_names(text: str) -> list[str]:
    """Returns the schedules that `--compare` names. Raises ScheduleError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        name.endswith(ENDS_OF_SCHEDULES) or find(name)
    return names


def compare(
    compile_: Callable[..., CompiledExample], request: Any, names: Sequence[str]
) -> tuple[Table, list[Timeline]]:
    """Returns a table with a row per schedule, and the predicted steps.

    The model is compiled, and measured, once per placement: nothing else of a schedule changes the
    graphs. Schedules that these ranks or microbatches do not admit stand below the table.
    """
    microbatches = request.options.microbatches or _common_microbatches(names, request)
    compiled_placements: dict[Placement, tuple[Program, CostSource]] = {}
    rows, steps, notes, texts = [], list[Timeline](), list[str](), set[str]()
    for name in names:
        keywords = {**request.keywords, "microbatches": microbatches, "schedule": name}
        variant = replace(request, keywords=keywords)
        try:
            schedule = schedule_of(variant)
            if is_searched(variant.options):  # its cuts are its own
                program = compile_(variant, schedule).program
                source = load_costs(program, request.costs)
            else:
                if schedule.placement not in compiled_placements:
                    program = compile_(variant, schedule).program
                    compiled_placements[schedule.placement] = (
                        program,
                        load_costs(program, request.costs),
                    )
                program, source = compiled_placements[schedule.placement]
                program = in_order(program, schedule)
        except (PipelineError, PartitionError, ScheduleError) as error:
            reason = str(error).splitlines()[0]
            notes.append(reason if reason.startswith(name) else f"{name}: {reason}")
            continue
        steps.append(simulate(program.schedule, source.costs))
        rows.append(_row(program, steps[-1]))
        texts.add(source.text)
    if not rows:
        raise PipelineError("; ".join(notes) or "--compare names nothing")
    return Table("compared", f"One step, predicted {', '.join(sorted(texts))}", rows, notes), steps


def _common_microbatches(names: Sequence[str], request: Any) -> int:
    """Returns a number of microbatches that all schedules admit, so that steps of equal work are
    compared."""
    ranks = request.options.ranks or RANKS
    count = 4 * ranks
    for name in names:
        with contextlib.suppress(ScheduleError):  # reported below the table
            count = max(count, smallest_microbatches(name, ranks, at_least=count))
    return count


def _row(program: Program, step: Timeline) -> list[Figure]:
    schedule, (count, sent) = program.schedule, count_messages(program)
    return [
        Figure("schedule", schedule.name),
        Figure("stages", schedule.stages),
        Figure("microbatches", schedule.microbatches),
        Figure("step", step.makespan, "s", "step"),
        Figure("bubble", step.bubble, "share", "step"),
        Figure("idle", idle_share(step), "share", "step"),
        Figure("peak waiting", int(max(step.peak_memory)), "B", "rank"),
        Figure("messages", count, "", "step"),
        Figure("sent", sent, "B", "step"),
    ]
