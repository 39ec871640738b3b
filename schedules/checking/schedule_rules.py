"""Proves that a schedule is complete, legal, free of deadlock and within its memory.

What each rank runs is counted, its messages are compared with those that its passes need, and one
run of the order graph proves the rest. Errors show the grid around the culprit.
"""

from collections import defaultdict
from itertools import accumulate
from typing import Any, Literal

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end, schedule_error_at
from zbcompile.schedules.execution.memory import deltas, peak_memory
from zbcompile.schedules.execution.order_graph import gc_disabled, require_stages, require_steps
from zbcompile.schedules.generators.forward_only import FORWARD_ONLY
from zbcompile.schedules.ir.actions import (
    BW,
    COLLECTIVES,
    COMPUTE,
    MESSAGES,
    PAIRED,
    SENDS,
    Action,
    B,
    F,
    Pair,
    S,
    T,
    W,
    flatten,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import routes_of
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, OPS, work_of
from zbcompile.schedules.ir.schedule import Schedule, require_schedule
from zbcompile.schedules.lowering.collectives import collectives_of

# declares another order of accumulation than that of the microbatches
OWN_WEIGHT_ORDER = frozenset(("zb-h1-lazy",))
WeightOrder = Literal["microbatch", "any"]


@gc_disabled()
def check(
    schedule: Schedule,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    weight_order: WeightOrder | None = None,
) -> None:
    """Raises `ScheduleError` with the culprit shown unless `schedule` is right.

    Every microbatch runs F and B+W (or BW; F alone if it is forward-only) once on every stage, on
    the stage's rank, in an order that its dependencies allow; forwards of the last stage in the
    order of microbatches (per model copy), weight gradients too (`weight_order`; `None`: unless the
    schedule of this name declares otherwise); peak memory within `memory_limit` (unit of
    `costs.activation`, default 1 per stage). If it has messages, these are exactly those needed,
    none overtakes another on a channel, and it cannot deadlock even if every send blocks until its
    receive is posted. Actions of the optimizer are the engine's: a schedule to check has none.

    >>> from zbcompile.schedules import build
    >>> check(build("1f1b", ranks=2, microbatches=4), memory_limit=2)
    """
    require_schedule(schedule)
    costs = costs or Costs.uniform(schedule.stages)
    require_steps(schedule)
    require_stages(schedule, costs)
    if schedule.placement.copies > 1 and (schedule.ranks % 2 or schedule.microbatches % 2):
        counts = f"{schedule.ranks} ranks and {schedule.microbatches} microbatches"
        raise ScheduleError(
            f"{schedule.name}: {counts}; two model copies need an even number of both"
        )
    compute, ranks = schedule.compute_only(), range(schedule.ranks)
    for rank in ranks:
        _check_counts(schedule, rank)
    if schedule.is_lowered:
        _check_communication(schedule)
    run_to_end(schedule, Costs.uniform(schedule.stages))
    for rank in ranks:
        _check_accumulation(compute, rank, weight_order)
    if memory_limit is None:
        return
    limit = memory_limit * (1 + 1e-9)  # sums of floats differ in their last bits
    for rank, peak in enumerate(peak_memory(compute, costs)):
        if peak > limit:
            steps = [index for index, s in enumerate(compute.orders[rank]) for _ in flatten((s,))]
            memory = accumulate(deltas(compute.orders[rank], costs))
            index = next(i for i, amount in zip(steps, memory, strict=True) if amount > limit)
            what = f"needs {peak} of memory; the limit is {memory_limit}, exceeded here"
            raise _error_at(compute, rank, index, what)


def _check_counts(schedule: Schedule, rank: int) -> None:
    """Requires every pass, message and collective of the rank once."""
    order, missing = schedule.orders[rank], dict[Any, None]()
    is_forward_only = schedule.name == FORWARD_ONLY
    for stage in schedule.placement.stages_of(rank):
        ops = [F] if is_forward_only else [F, B, W]
        if stage in schedule.shards:
            ops += [S] if is_forward_only else [S, T]
            ops += collectives_of(schedule) if schedule.is_lowered else ()
        missing |= dict.fromkeys(
            (op, stage, m) for op in ops for m in schedule.microbatches_of(stage, rank)
        )
    for (op, stage), (source, destination, _) in (
        routes_of(schedule, rank).items() if schedule.is_lowered else ()
    ):
        if source != destination:
            missing |= dict.fromkeys((op, stage, m) for m in schedule.microbatches_of(stage, rank))
    for index, step in enumerate[Any](order):
        is_pair = step.__class__ is Pair
        if is_pair and (step[0][0], step[1][0]) not in PAIRED:
            reason = (
                f"a pair is a forward F and a backward B or BW, or an F or B and a W, not {step}"
            )
            raise _error_at(schedule, rank, index, reason)
        for action in step if is_pair else (step,):
            try:
                if missing.pop(action, 0) is not None:  # BW, or wrong
                    op, stage, microbatch = action
                    for result in work_of(op):
                        del missing[result, stage, microbatch]
            except (KeyError, TypeError, ValueError):
                raise _error_at(schedule, rank, index, _why_wrong(schedule, rank, action)) from None
    for op, stage, microbatch in missing:
        names = " or ".join(name for name in COMPUTE_OPS if op in work_of(name)) or op
        what = f"rank {rank} never runs {names} of stage {stage}, microbatch {microbatch}"
        raise schedule_error_at(f"{schedule.name}: {what}", schedule.orders, rank, len(order) - 1)


def _error_at(schedule: Schedule, rank: int, index: int, reason: str) -> ScheduleError:
    return schedule_error_at(
        f"{schedule.name}: rank {rank}, step {index}: {reason}", schedule.orders, rank, index
    )


def _why_wrong(schedule: Schedule, rank: int, action: object) -> str:
    if not isinstance(action, Action) or not all(isinstance(number, int) for number in action[1:]):
        return f"{action!r} is not an action; expected Action(op, stage, microbatch)"
    op, stage, microbatch = action
    if op not in OPS:
        return f"{action} has an unknown operation; expected one of {', '.join(sorted(COMPUTE))}"
    if stage not in range(schedule.stages) or microbatch not in range(schedule.microbatches):
        counts = f"stages 0 to {schedule.stages - 1}, microbatches 0 to {schedule.microbatches - 1}"
        return f"{action} is of stage {stage}, microbatch {microbatch}; this schedule has {counts}"
    if op in COMPUTE_OPS and schedule.rank_of(stage, microbatch) != rank:
        return (
            f"{action} is on rank {rank}; its place is rank {schedule.rank_of(stage, microbatch)}"
        )
    return (
        f"{action} appears a second time, beside a BW that includes it, or where nothing needs it"
    )


def _check_accumulation(schedule: Schedule, rank: int, weight_order: WeightOrder | None) -> None:
    """Requires losses and weight gradients in the order of microbatches, which decides the bits."""
    is_ordered = weight_order != "any" and (weight_order or schedule.name not in OWN_WEIGHT_ORDER)
    latest: dict[tuple[str, int], int] = {}
    for index, step in enumerate(schedule.orders[rank]):
        for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
            if (is_ordered and op in (W, BW)) or (op == F and stage == schedule.stages - 1):
                what = "forwards" if op == F else "weight gradients"
                later = latest.get((what, stage), microbatch)
                if later > microbatch:
                    runs = f"{what} of stage {stage} run microbatch {later} before {microbatch}"
                    raise _error_at(schedule, rank, index, f"{runs}; expected ascending order")
                latest[what, stage] = microbatch


def _check_communication(schedule: Schedule) -> None:
    """Requires receives in the order of the sends on every channel, and collectives
    in one order."""
    sent, received = (defaultdict[tuple[int, int], list[Any]](list) for _ in range(2))
    first: list[tuple[Any, ...]] = []
    for rank, order in enumerate(schedule.orders):
        routes, posted = routes_of(schedule, rank), list[tuple[Any, ...]]()
        for index, step in enumerate(order):
            if step[0] in MESSAGES:
                op, stage, microbatch = step
                source, destination, target = routes[op, stage]  # type: ignore[index]
                messages, at = (sent, target) if op in SENDS else (received, stage)
                messages[source, destination].append((MESSAGE_OPS[op], at, microbatch))
            elif step[0] in COLLECTIVES:
                posted.append((step[0], step[2]))  # type: ignore[misc]
                if posted != first[: len(posted)] and first:
                    op, microbatch = first[len(posted) - 1]
                    what = (
                        f"{step} is posted where another rank posts {op} of microbatch {microbatch}"
                    )
                    raise _error_at(schedule, rank, index, what)
        first = first or posted
    for channel in sent:
        for place, (send, receive) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if send != receive:
                what = f"message {place} is for {Action(*send)}, but {Action(*receive)} is posted"
                raise ScheduleError(
                    f"{schedule.name}: channel {channel[0]} -> {channel[1]}: {what}"
                )
