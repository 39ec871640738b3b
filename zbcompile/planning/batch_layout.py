"""Splits batches into the microbatches of a schedule, which the first batch may choose."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from zbcompile.batches.batch import Batch, Microbatch, Microbatches, require_divisible
from zbcompile.options import PipelineOptions, is_searched
from zbcompile.planning.auto import compile_auto
from zbcompile.planning.choose_schedule import fit_to_batch, fit_to_count
from zbcompile.program_cache.orders import step_order
from zbcompile.program_cache.programs import ProgramCache
from zbcompile.progress import LONG, Progress


class BatchLayout:
    """Splits batches into microbatches; with the first batch it decides the schedule of
    `compiled`."""

    def __init__(self, model: nn.Module, options: PipelineOptions, compiled: ProgramCache) -> None:
        self._model, self._options, self._compiled = model, options, compiled
        self._unfitted = compiled.schedule  # as it is before a first step fits it
        self._admitted: set[int] = set()  # numbers of microbatches
        self._rows: int | None = None  # samples of a usual microbatch

    def split(self, batch: Batch, announce: bool) -> Microbatches:
        """Returns the microbatches of a batch.

        The first batch fixes their number: `microbatches=`, or what a named schedule admits.
        Raises PipelineError for a batch that cannot be cut.
        """
        compiled = self._compiled
        if not compiled.binding.trains:
            compiled.schedule = fit_to_batch(self._unfitted, self._options, batch, announce)
        if self._is_undecided:
            require_divisible(batch, compiled.schedule.microbatches)
            self._decide(batch.microbatch(0, compiled.schedule.microbatches))
        count = _count_for(
            batch, compiled.schedule.microbatches, self._rows if compiled.binding.trains else None
        )
        if count == compiled.schedule.microbatches:
            self._rows = batch.rows(0, count)
        self._require_order(count)
        return batch.into(count)

    def fit(self, microbatches: Sequence[Microbatch]) -> Microbatches:
        """Returns microbatches that are already split. Raises PipelineError for a number that the
        schedule does not admit."""
        if not self._compiled.binding.trains:
            self._compiled.schedule = fit_to_count(self._unfitted, self._options, len(microbatches))
        if self._is_undecided:
            self._decide(microbatches[0])
        self._require_order(len(microbatches))
        return Microbatches(
            tuple(microbatches),
            alike=len({microbatch.signature for microbatch in microbatches}) == 1,
        )

    @property
    def _is_undecided(self) -> bool:
        return not self._compiled.binding.trains and is_searched(self._options)

    def _require_order(self, count: int) -> None:
        """Raises PipelineError, before a rank waits, for a number of microbatches that the schedule
        does not admit."""
        compiled = self._compiled
        program = compiled.binding.program if compiled.binding.trains else None
        if (
            program is not None
            and count != compiled.schedule.microbatches
            and count not in self._admitted
        ):
            step_order(program, count)
            self._admitted.add(count)

    def _decide(self, microbatch: Microbatch) -> None:
        """Chooses the schedule by the predicted step, for the first batch's microbatches."""
        compiled, options, what = self._compiled, self._options, "choosing the schedule"
        usual = compiled.schedule
        with (
            compiled.ranks.watch.position.turn_to(what),
            Progress(f"zbcompile: {what}", first=LONG),
        ):
            exported = compiled.export(microbatch)
            make = partial(compiled.make, microbatch, exported)
            program = compile_auto(
                make, options.choices, usual.ranks, usual.microbatches, options.chunks
            )
        compiled.searched = exported, program
        compiled.schedule, compiled.decided = program.schedule, program.choices


def _count_for(batch: Batch, usual: int, rows: int | None) -> int:
    """Returns the number of microbatches of a batch.

    It is the usual number if that divides the batch, else the fewest with at most the usual `rows`
    (None before the first step). Raises PipelineError if neither is possible.
    """
    if rows is None or batch.divides_into(usual):
        require_divisible(batch, usual)
        return usual
    fitting = (
        n for n in range(1, batch.size + 1) if batch.divides_into(n) and batch.size // n <= rows
    )
    count = next(fitting, usual)  # inputs of several lengths may have no such divisor
    require_divisible(batch, count)
    return count
