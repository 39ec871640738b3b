"""The order of a compiled program for another number of microbatches."""

from zbcompile.compiler.paired_schedule import in_order
from zbcompile.errors import PipelineError
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule, admits, build, names
from zbcompile.schedules.generators.registry import find


def step_order(program: Program, count: int) -> Schedule:
    """The order of a step of that many microbatches, with its messages. Raises PipelineError if the
    name of the schedule does not admit that many, or if its order is not the one of its name."""
    if count == program.schedule.microbatches:
        return program.lowered
    _require_order(program, count)
    return _built(program, count)


def _require_order(program: Program, count: int) -> None:
    schedule = program.schedule
    counted = f"{count} microbatch{'es' * (count != 1)}"
    problem = f"the step has {counted}, and the schedule {schedule.name}"
    rule = schedule.name in names() and find(schedule.name).generate is not None
    if not rule or _built(program, schedule.microbatches).compute_only() != schedule:
        raise PipelineError(
            f"{problem} is an order for {schedule.microbatches} alone. Pass as many, a batch that"
            " divides into as many, or a schedule by its name."
        )
    if not admits(schedule.name, schedule.ranks, count):
        near = [
            n
            for n in range(1, 2 * schedule.microbatches + 1)
            if admits(schedule.name, schedule.ranks, n)
        ]
        raise PipelineError(
            f"{problem} admits {', '.join(map(str, near))} ... on {schedule.ranks} ranks."
            " Pass one of these numbers."
        )


def _built(program: Program, count: int) -> Schedule:
    """The order of its name, paired as the program's own one where its passes exchange tensors."""
    schedule = program.schedule
    chunks = schedule.placement.chunks if find(schedule.name).free_chunks else None
    return in_order(program, build(schedule.name, schedule.ranks, count, chunks=chunks)).lowered
