"""Memory budgets: how many bytes each stage may keep per microbatch so that every rank stays within
the limit `memory=`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zbcompile.passes.errors import CompileError


@dataclass(frozen=True)
class StageMemory:
    """The memory of one stage.

    Attributes:
        rank: The rank that runs the stage.
        in_flight: The most microbatches between F and B at once, under the schedule.
        kept: Bytes per microbatch that F keeps for B and W without recomputation.
        smallest: Those bytes if everything is recomputed that can be.
    """

    rank: int
    in_flight: int
    kept: int
    smallest: int


def stage_budgets(
    limit: int, reserved: Mapping[int, int], stages: Sequence[StageMemory]
) -> list[int | None]:
    """Returns for each stage the bytes that it may keep per microbatch; None for all of them.

    The stages of a rank get equal shares of what they would keep, but at least what they must.

    Args:
        limit: Bytes per rank.
        reserved: Bytes of each rank for everything else: parameters, gradients, optimizer state,
            message buffers, values between B and W, and the peak of a pass.

    Raises:
        CompileError: A rank cannot stay within the limit.

    >>> stage_budgets(100, {0: 20}, [StageMemory(0, 2, 60, 10)])
    [40]
    """
    budgets: list[int | None] = [None] * len(stages)
    for rank in sorted({stage.rank for stage in stages}):
        numbers = [number for number, stage in enumerate(stages) if stage.rank == rank]
        available = limit - reserved.get(rank, 0)
        needed = sum(stages[number].in_flight * stages[number].kept for number in numbers)
        if needed <= available:
            continue
        smallest = sum(stages[number].in_flight * stages[number].smallest for number in numbers)
        if smallest > available:
            raise CompileError(
                f"memory={limit:,} bytes: rank {rank} needs at least "
                f'{reserved.get(rank, 0) + smallest:,} bytes with recompute="full", '
                f"{smallest:,} of them for microbatches in flight. Allow more memory, make the "
                "microbatches smaller, or use a schedule with fewer microbatches in flight."
            )
        for number, budget in _shares(available, {n: stages[n] for n in numbers}).items():
            budgets[number] = budget
    return budgets


def _shares(available: int, stages: Mapping[int, StageMemory]) -> dict[int, int]:
    """Returns equal shares of `kept`. A stage whose share would be below `smallest` gets that, and
    the others share the rest."""
    budgets: dict[int, int] = {}
    rest = dict(stages)
    while rest:
        needed = sum(stage.in_flight * stage.kept for stage in rest.values())
        low = {
            number: stage
            for number, stage in rest.items()
            if needed and available * stage.kept // needed < stage.smallest
        }
        if not low:
            break
        for number, stage in low.items():
            budgets[number] = stage.smallest
            available -= stage.in_flight * stage.smallest
            del rest[number]
    needed = sum(stage.in_flight * stage.kept for stage in rest.values())
    budgets |= {
        number: available * stage.kept // needed if needed else 0 for number, stage in rest.items()
    }
    return budgets
