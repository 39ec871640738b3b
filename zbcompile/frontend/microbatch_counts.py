"""How many microbatches a step has: as many as the schedule, or as many as a batch of another size takes."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.batch import Batch, Microbatch, require_divisible
from zbcompile.program.program import Program
from zbcompile.runtime.engine import Executable
from zbcompile.runtime.rank_plan import plan_rank
from zbcompile.schedules.generators.registry import admits, find, names
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.lowering.lower import lower
from zbcompile.schedules.searching.by_name import build


def count_for(batch: Batch, usual: int, rows: int | None) -> int:
    """How many microbatches `batch` is cut into: the usual number if that divides it, else as many as leave each no
    more samples than the usual `rows` (None before the first step). Raises PipelineError if neither is possible."""
    if rows is None or batch.divides_into(usual):
        require_divisible(batch, usual)
        return usual
    fitting = (n for n in range(1, batch.size + 1) if batch.divides_into(n) and batch.size // n <= rows)
    count = next(fitting, usual)  # inputs of several lengths may have no such divisor
    require_divisible(batch, count)
    return count


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
        raise PipelineError(f"{problem} admits {_listed(near)} ... on {own.ranks} ranks. Pass one of these numbers.")
    return _built(program, count)


def at_count(executable: Executable, count: int, ranks: Ranks) -> Executable:
    """The same graphs in the order for another number of microbatches."""
    program = replace(executable.program, lowered=lower(order_at(executable.program, count)))
    plans = tuple(plan_rank(program, rank, executable.stages) for rank in ranks.local)
    return replace(executable, program=program, plans=plans)


def _built(program: Program, count: int) -> Schedule:
    own = program.schedule
    chunks = own.placement.chunks if find(own.name).free_chunks else None
    schedule = build(own.name, own.ranks, count, chunks=chunks)
    return schedule if program.vocabulary is None else insert(schedule, program.vocabulary, program.stages)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def require_few(microbatches: Sequence[Microbatch], limit: int) -> None:
    """Raise PipelineError if the microbatches of a step have more shapes than programs are kept."""
    kinds = len({each.signature for each in microbatches})
    if kinds > limit:
        raise PipelineError(
            f"the microbatches of this step have {kinds} shapes, and max_shapes={limit} programs are kept. Raise "
            "it, or pad to fewer shapes."
        )
