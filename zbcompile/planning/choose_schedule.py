"""Which schedule a pipeline runs - a named one for its ranks and first batch, a file's, or one that is given - how
many microbatches each batch becomes, and what a named one is for a layout that is only priced."""

from collections.abc import Sequence

from zbcompile.batches.batch import Batch
from zbcompile.errors import PipelineError
from zbcompile.options import PipelineOptions, is_searched
from zbcompile.program.choice import Layout
from zbcompile.schedules import (
    Costs,
    Schedule,
    ScheduleError,
    SearchResult,
    admits,
    bound,
    build,
    check,
    lower,
    simulate,
    smallest_microbatches,
)
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
from zbcompile.schedules.searching.problem import ROUNDING
from zbcompile.schedules.searching.starting_orders import HEURISTIC

PROVISIONAL = "zb-v"  # until a searched layout is known: it admits any number of microbatches


def choose_schedule(options: PipelineOptions, ranks: int) -> Schedule:
    """The schedule that the options ask for, on `ranks` ranks; for "auto" one that stands in until the search. Raises
    PipelineError for one of other ranks or microbatches, and ScheduleError for one that `check` refuses. Weight
    gradients must be summed in the order of microbatches only with `exact=True`."""
    given, chunks = (PROVISIONAL, None) if is_searched(options) else (options.schedule, options.chunks)
    if isinstance(given, str):
        return build(given, ranks, options.microbatches or _usual_count(given, ranks, chunks), chunks=chunks)
    if given.ranks != ranks:
        raise PipelineError(
            f"the schedule {given.name} is for {given.ranks} ranks ({given.stages} stages), but there are {ranks}. "
            f"Build it with ranks={ranks}, or start {given.ranks} ranks."
        )
    if options.microbatches not in (None, given.microbatches):
        raise PipelineError(
            f"microbatches={options.microbatches}, but the schedule {given.name} is for {given.microbatches}."
        )
    check(lower(given) if given.programs else given, weight_order=None if options.exact else "any")
    return given


def counts_for(options: PipelineOptions, batch: Batch, schedule: Schedule) -> tuple[int, ...]:
    """The numbers of microbatches that a search may choose: what divides the batch, up to eight for each rank."""
    if options.microbatches is not None:
        return ()
    return tuple(n for n in range(schedule.ranks, 8 * schedule.ranks + 1) if batch.divides_into(n))


def _usual_count(name: str, ranks: int, chunks: int | None) -> int:
    """The smallest count from 2 x stages on."""
    stages = build(name, ranks, smallest_microbatches(name, ranks), chunks=chunks).stages
    return smallest_microbatches(name, ranks, at_least=2 * stages, chunks=chunks)


def fit_to_batch(schedule: Schedule, options: PipelineOptions, batch: Batch, announce: bool) -> Schedule:
    """The schedule, if it has a name and `microbatches=` is not given, for a count that divides the batch: the smallest
    from the usual one on up to four times as many, else the largest below; the schedule as it is if there is none."""
    if options.microbatches is not None or not isinstance(options.schedule, str):
        return schedule
    usual = schedule.microbatches
    fitting = [n for n in range(2, 4 * usual + 1) if batch.divides_into(n) and admits(schedule.name, schedule.ranks, n)]
    count = min((n for n in fitting if n >= usual), default=max(fitting, default=usual))
    if announce and not is_searched(options):
        why = f"the smallest that {schedule.name} admits from 2 x {schedule.stages} stages on"
        if count != usual:
            why = f"into which a batch of {batch.size} divides; {usual} would be {why}"
        print(f"zbcompile: microbatches= not given; using {count}, {why}.")
    return fit_to_count(schedule, options, count)


def fit_to_count(schedule: Schedule, options: PipelineOptions, count: int) -> Schedule:
    """The schedule, if it has a name and `microbatches=` is not given, for `count` microbatches; else as it is."""
    if options.microbatches is not None or not isinstance(options.schedule, str):
        return schedule
    return build(schedule.name, schedule.ranks, count, chunks=None if is_searched(options) else options.chunks)


def placement_of(name: str, ranks: int, chunks: int | None = None) -> str:
    """The placement of a named schedule. Raises ScheduleError if it has none on these ranks."""
    return str(build(name, ranks, smallest_microbatches(name, ranks, chunks=chunks), chunks=chunks).placement)


def named_order(
    name: str, layout: Layout, costs: Costs, microbatches: int, limits: Sequence[float] | None, chunks: int | None
) -> SearchResult:
    """The named schedule on a layout, with its bound, in the form of a search's result. `limits` are the bytes that may
    wait on each rank, `chunks` the stages per rank, if given. Raises ScheduleError for a number of microbatches that
    the schedule does not admit, and if more waits on a rank."""
    lowest = min(limits) if limits and find(name).name in HEURISTIC else None  # others do not adapt to it
    order = build(name, layout.ranks, microbatches, costs, lowest, chunks)
    if layout.vocab != "off":
        order = with_vocabulary(order, layout.barriers, costs)
    timeline = simulate(order, costs)
    for rank, limit in enumerate(limits or ()):
        peak = timeline.peak_memory[rank]
        if peak > limit * ROUNDING:
            raise ScheduleError(
                f"{order.name}: {peak:,.0f} bytes wait between passes on rank {rank}, {peak - limit:,.0f} more than "
                "memory= leaves"
            )
    least = bound(costs, layout.ranks, microbatches, layout.placement, limits, barriers=layout.barriers)
    return SearchResult(order, timeline, least, timeline.makespan, order.name, 0, 0.0, {}, {})
