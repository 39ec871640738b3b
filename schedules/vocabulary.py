"""The rules of the vocabulary passes S and T, where a schedule has any."""

from typing import cast

from zbcompile.schedules.actions import Action, S, T
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.excerpt import culprit_error
from zbcompile.schedules.schedule import Schedule


def check_vocabulary(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every shard runs S and then T once for every microbatch.

    A shard is named by a stage of the rank that holds it.
    """
    progress: dict[int, dict[int, str]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            if step[0] != S and step[0] != T:
                continue
            op, stage, microbatch = cast(Action, step)
            before = progress.setdefault(stage, {}).get(microbatch)
            owned = stage in schedule.placement.stages_of(rank)
            if not owned or microbatch not in range(schedule.microbatches) or before != {S: None, T: S}[op]:
                reason = "expected once, S before T, on a rank that has this stage, for an existing microbatch"
                raise culprit_error(f"{schedule.name}: rank {rank}: {step}: {reason}", schedule.orders, rank, index)
            progress[stage][microbatch] = op
    for shard, states in progress.items():
        for microbatch in range(schedule.microbatches):
            if states.get(microbatch) != T:
                missing = Action(S if microbatch not in states else T, shard, microbatch)
                raise ScheduleError(f"{schedule.name}: {missing} is missing: every shard runs every microbatch")
