"""Which schedule a pipeline runs (a named one for its ranks and first batch, a file's, or one that
is given), and how many microbatches each batch becomes."""

from zbcompile.batches.batch import Batch
from zbcompile.errors import PipelineError
from zbcompile.options import PipelineOptions, is_searched
from zbcompile.schedules import Schedule, admits, build, check, smallest_microbatches

PROVISIONAL = "zb-v"  # until a name is chosen: it admits any number of microbatches


def choose_schedule(options: PipelineOptions, ranks: int) -> Schedule:
    """The schedule that the options ask for, on `ranks` ranks; for "auto" one that stands in until
    the search. Raises PipelineError for one of other ranks or microbatches, and ScheduleError for
    one that `check` refuses. Weight gradients must be summed in the order of microbatches only with
    `exact=True`."""
    given, chunks = (
        (PROVISIONAL, None) if is_searched(options) else (options.schedule, options.chunks)
    )
    if isinstance(given, str):
        return build(
            given, ranks, options.microbatches or _usual_count(given, ranks, chunks), chunks=chunks
        )
    if given.ranks != ranks:
        raise PipelineError(
            f"the schedule {given.name} is for {given.ranks} ranks ({given.stages} stages), but"
            f" there are {ranks}. Build it with ranks={ranks}, or start {given.ranks} ranks."
        )
    if options.microbatches not in (None, given.microbatches):
        raise PipelineError(
            f"microbatches={options.microbatches}, but the schedule {given.name} is for"
            f" {given.microbatches}."
        )
    check(given, weight_order=None if options.exact else "any")
    return given


def _usual_count(name: str, ranks: int, chunks: int | None) -> int:
    """The smallest count from 2 x stages on."""
    stages = build(name, ranks, smallest_microbatches(name, ranks), chunks=chunks).stages
    return smallest_microbatches(name, ranks, at_least=2 * stages, chunks=chunks)


def fit_to_batch(
    schedule: Schedule, options: PipelineOptions, batch: Batch, announce: bool
) -> Schedule:
    """The schedule, if it has a name and `microbatches=` is not given, for a count that divides the
    batch: the smallest from the usual one on up to four times as many, else the largest below; the
    schedule as it is if there is none.
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
    """The schedule, if it has a name and `microbatches=` is not given, for `count` microbatches;
    else as it is."""
    if options.microbatches is not None or not isinstance(options.schedule, str):
        return schedule
    return build(
        schedule.name,
        schedule.ranks,
        count,
        chunks=None if is_searched(options) else options.chunks,
    )
