"""The order of a compiled program for another number of microbatches."""

from dataclasses import replace

from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.errors import PipelineError
from zbcompile.program.program import Program
from zbcompile.schedules import Lowered, Schedule, admits, build, lower, names
from zbcompile.schedules.generators.registry import find


def step_order(program: Program, count: int) -> Lowered:
    """The order of a step of that many microbatches, with its messages."""
    return program.lowered if count == program.schedule.microbatches else lower(order_at(program, count))


def order_at(program: Program, count: int) -> Schedule:
    """The schedule of a program for another number of microbatches. Raises PipelineError if its name does not admit
    that many, or if its order is not the one of its name."""
    own = program.schedule
    if count == own.microbatches:
        return own
    problem = f"the step has {count} microbatches, and the schedule {own.name}"
    rule = own.name in names() and find(own.name).generate is not None
    if not rule or _built(program, own.microbatches) != own:
        raise PipelineError(
            f"{problem} is an order for {own.microbatches} alone. Pass as many, a batch that divides into as many, or "
            "a schedule by its name."
        )
    if not admits(own.name, own.ranks, count):
        near = [n for n in range(1, 2 * own.microbatches + 1) if admits(own.name, own.ranks, n)]
        raise PipelineError(
            f"{problem} admits {', '.join(map(str, near))} ... on {own.ranks} ranks. Pass one of these numbers."
        )
    return _built(program, count)


def _built(program: Program, count: int) -> Schedule:
    own = program.schedule
    chunks = own.placement.chunks if find(own.name).free_chunks else None
    schedule = build(own.name, own.ranks, count, chunks=chunks)
    if program.vocabulary is not None:
        schedule = insert(schedule, program.vocabulary, program.stages)
    return replace(schedule, ways=own.ways)
