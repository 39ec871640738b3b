"""Chooses the schedule of a pipeline and the number of its microbatches."""

from zbcompile.batches.batch import Batch
from zbcompile.errors import PipelineError
from zbcompile.options import PipelineOptions, is_searched
from zbcompile.schedules import Schedule, admits, build, check, smallest_microbatches

PROVISIONAL = "zb-v"  # until a name is chosen: it admits any number of microbatches


def choose_schedule(options: PipelineOptions, ranks: int) -> Schedule:
    """Returns the schedule of the options; for "auto" one that stands in until the first batch.

    Only `exact=True` requires that weight gradients are summed in the order of microbatches.

    Raises:
        PipelineError: A schedule is for other ranks or microbatches.
        ScheduleError: `check` refuses it.
    """
    chosen, chunks = (
        (PROVISIONAL, None) if is_searched(options) else (options.schedule, options.chunks)
    )
    if isinstance(chosen, str):
        return build(
            chosen,
            ranks,
            options.microbatches or _usual_count(chosen, ranks, chunks),
            chunks=chunks,
        )
    if chosen.ranks != ranks:
        raise PipelineError(
            f"the schedule {chosen.name} is for {chosen.ranks} ranks ({chosen.stages} stages), but"
            f" there are {ranks}. Build it with ranks={ranks}, or start {chosen.ranks} ranks."
        )
    if options.microbatches not in (None, chosen.microbatches):
        raise PipelineError(
            f"microbatches={options.microbatches}, but the schedule {chosen.name} is for"
            f" {chosen.microbatches}."
        )
    check(chosen, weight_order=None if options.exact else "any")
    return chosen


def _usual_count(name: str, ranks: int, chunks: int | None) -> int:
    """Returns the smallest count from 2 x stages on."""
    stages = build(name, ranks, smallest_microbatches(name, ranks), chunks=chunks).stages
    return smallest_microbatches(name, ranks, at_least=2 * stages, chunks=chunks)


def fit_to_batch(
    schedule: Schedule, options: PipelineOptions, batch: Batch, announce: bool
) -> Schedule:
    """Returns a named schedule for a count that divides the batch, if `microbatches=` is not set.

    The count is the smallest from the usual one on up to four times as many, else the largest
    below. Without one the schedule stays as it is.
    """
    if options.microbatches is not None or not isinstance(options.schedule, str):
        return schedule
    usual = schedule.microbatches
    fitting = [
        n
        for n in range(2, 4 * usual + 1)
        if batch.divides_into(n) and admits(schedule.name, schedule.ranks, n)
    ]
    count = min((n for n in fitting if n >= usual), default=max(fitting, default=usual))
    if announce and not is_searched(options):
        why = f"the smallest that {schedule.name} admits from 2 x {schedule.stages} stages on"
        if count != usual:
            why = f"into which a batch of {batch.size} divides; {usual} would be {why}"
        print(f"zbcompile: microbatches= not given; using {count}, {why}.")
    return fit_to_count(schedule, options, count)


def fit_to_count(schedule: Schedule, options: PipelineOptions, count: int) -> Schedule:
    """Returns a named schedule for `count` microbatches, if `microbatches=` is not set."""
    if options.microbatches is not None or not isinstance(options.schedule, str):
        return schedule
    return build(
        schedule.name,
        schedule.ranks,
        count,
        chunks=None if is_searched(options) else options.chunks,
    )
