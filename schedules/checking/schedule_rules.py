"""Proves that a schedule is complete, legal, free of deadlock and within its memory.

What each rank runs is counted, its messages are compared with those that its passes need, and one run of the order
graph proves the rest. Errors show the grid around the culprit.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any, Literal, NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end, schedule_error_at
from zbcompile.schedules.execution.memory import deltas, peak_memory
from zbcompile.schedules.execution.order_graph import gc_disabled, require_stages, require_steps
from zbcompile.schedules.generators.forward_only import FORWARD_ONLY
from zbcompile.schedules.ir.actions import (
    BW,
    COLLECTIVES,
    COMPUTE,
    EXCHANGES,
    MESSAGES,
    ONCE,
    PAIRED,
    RECEIVES,
    SENDS,
    Action,
    B,
    F,
    Pair,
    S,
    Step,
    T,
    W,
    flatten,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import routes_of
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, OPTIMIZER_OPS, result_of, work_of
from zbcompile.schedules.ir.schedule import Schedule, require_schedule
from zbcompile.schedules.lowering.collectives import collectives_of
from zbcompile.schedules.lowering.updates import with_exchanges

OWN_WEIGHT_ORDER = frozenset(("zb-h1-lazy",))  # declares another order of accumulation than that of the microbatches
WeightOrder = Literal["microbatch", "any"]


class Report(NamedTuple):
    """The figures of a correct schedule, per rank.

    `peak_memory` is in the unit of `costs.activation`; `receive_buffers` is the largest number of receives that are
    posted and not yet consumed, `None` for a schedule without messages.
    """

    peak_memory: tuple[float, ...]
    receive_buffers: tuple[int, ...] | None


@gc_disabled()
def check(
    schedule: Schedule,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    weight_order: WeightOrder | None = None,
) -> Report:
    """Raises `ScheduleError` with the culprit shown unless `schedule` is right.

    Every microbatch runs F and B+W (or BW; F alone if it is forward-only) once on every stage, on the stage's rank, in
    an order that its dependencies allow; forwards of the last stage in the order of microbatches (per model copy),
    weight gradients too (`weight_order`; `None`: unless the schedule of this name declares otherwise); peak memory
    within `memory_limit` (unit of `costs.activation`, default 1 per stage). If it has messages, these are exactly those
    needed, none overtakes another on a channel, and it cannot deadlock even if every send blocks until its receive is
    posted.

    >>> from zbcompile.schedules import build
    >>> check(build("1f1b", ranks=2, microbatches=4)).peak_memory
    (2, 1)
    """
    require_schedule(schedule)
    costs = costs or Costs.uniform(schedule.stages)
    require_steps(schedule)
    require_stages(schedule, costs)
    if schedule.placement.copies > 1 and (schedule.ranks % 2 or schedule.microbatches % 2):
        counts = f"{schedule.ranks} ranks and {schedule.microbatches} microbatches"
        raise ScheduleError(f"{schedule.name}: {counts}; two model copies need an even number of both")
    compute, ranks = schedule.compute_only(), range(schedule.ranks)
    for rank in ranks:
        _check_passes(compute, rank)
        _check_once(compute, rank)
    if schedule.is_lowered:
        _check_messages(schedule)
        _check_collectives(schedule)
    run_to_end(schedule, Costs.uniform(schedule.stages))
    for rank in ranks:
        _check_accumulation(compute, rank, weight_order)
    peaks = peak_memory(compute, costs)
    for rank, peak in enumerate(peaks if memory_limit is not None else ()):
        if peak > memory_limit * (1 + 1e-9):  # type: ignore[operator]  # sums of floats differ in their last bits
            owner = [index for index, step in enumerate(compute.orders[rank]) for _ in flatten((step,))]
            memory = zip(owner, accumulate(deltas(compute.orders[rank], costs)), strict=True)
            index = next(index for index, amount in memory if amount > memory_limit)  # type: ignore[operator]
            what = f"rank {rank} needs {peak} of memory; the limit is {memory_limit}, exceeded here"
            raise schedule_error_at(f"{schedule.name}: {what}", compute.orders, rank, index)
    return Report(peaks, tuple(_receive_buffers(schedule, r) for r in ranks) if schedule.is_lowered else None)


def _check_passes(schedule: Schedule, rank: int) -> None:
    """Requires every pass of the rank once."""
    order, passes, shard_passes = schedule.orders[rank], [F, B, W], [S, T]
    if schedule.name == FORWARD_ONLY:
        passes, shard_passes = [F], [S]
    missing: dict[Any, None] = {}
    for stage in schedule.placement.stages_of(rank):
        for op in passes + shard_passes * (stage in schedule.shards):
            missing |= dict.fromkeys((op, stage, m) for m in schedule.microbatches_of(stage, rank))
    for index, step in enumerate(order):
        if isinstance(step, Pair) and (step.first.op, step.second.op) not in PAIRED:
            reason = f"a pair is a forward F and a backward B or BW, or an F or B and a W, not {step}"
            raise _error_at(schedule, rank, index, reason)
        for action in step if isinstance(step, Pair) else (step,):
            try:
                for op in () if action.op in ONCE else work_of(action.op):
                    del missing[op, action.stage, action.microbatch]
            except (KeyError, TypeError, AttributeError):
                raise _error_at(schedule, rank, index, _why_wrong(schedule, rank, action)) from None
    for op, stage, microbatch in missing:
        names = " or ".join(name for name in COMPUTE_OPS if op in work_of(name))
        what = f"rank {rank} never runs {names} of stage {stage}, microbatch {microbatch}"
        raise schedule_error_at(f"{schedule.name}: {what}", schedule.orders, rank, len(order) - 1)


def _error_at(schedule: Schedule, rank: int, index: int, reason: str) -> ScheduleError:
    return schedule_error_at(f"{schedule.name}: rank {rank}, step {index}: {reason}", schedule.orders, rank, index)


def _why_wrong(schedule: Schedule, rank: int, action: object) -> str:
    if not isinstance(action, Action) or not all(isinstance(number, int) for number in action[1:]):
        return f"{action!r} is not an action; expected Action(op, stage, microbatch)"
    op, stage, microbatch = action
    if op not in COMPUTE_OPS:
        return f"{action} has an unknown operation; expected one of {', '.join(sorted(COMPUTE))}"
    if stage not in range(schedule.stages) or microbatch not in range(schedule.microbatches):
        counts = f"stages 0 to {schedule.stages - 1}, microbatches 0 to {schedule.microbatches - 1}"
        return f"{action} is of stage {stage}, microbatch {microbatch}; this schedule has {counts}"
    if schedule.rank_of(stage, microbatch) != rank:
        return f"{action} is on rank {rank}; its place is rank {schedule.rank_of(stage, microbatch)}"
    return f"{action} appears a second time, beside a BW that includes it, or on a stage that does not run it"


def _check_once(schedule: Schedule, rank: int) -> None:
    """Requires the optimizer's actions on every stage if on any, after what they need, before what needs them."""
    order, once = schedule.orders[rank], schedule.ops & ONCE
    actions = [(index, action) for index, step in enumerate(order) for action in flatten((step,))] if once else []
    missing = {Action(op, stage, 0) for op in once for stage in schedule.placement.stages_of(rank)}
    for index, action in actions:
        if action.op in once:
            spec = OPTIMIZER_OPS[action.op]
            after, before = (
                [i for i, a in actions if a.stage == action.stage and not {*ops}.isdisjoint(work_of(a.op))]
                for ops in (spec.after, spec.before)
            )
            if action not in missing or not max(after, default=-1) < index < min(before, default=len(order)):
                rules = f"after all {', '.join(spec.after)}" if spec.after else f"before all {', '.join(spec.before)}"
                raise _error_at(schedule, rank, index, f"{action}: expected once, {rules} of its stage on its rank")
            missing.remove(action)
    if missing:
        raise _error_at(schedule, rank, len(order) - 1, f"{min(missing)} is missing")


def _check_accumulation(schedule: Schedule, rank: int, weight_order: WeightOrder | None) -> None:
    """Requires losses and weight gradients in the order of microbatches, which decides the bits."""
    rules = [((F,), "forwards of the last stage", schedule.stages - 1)]
    if weight_order != "any" and (weight_order or schedule.name not in OWN_WEIGHT_ORDER):
        stages = schedule.placement.stages_of(rank)
        rules += [((W, BW), "weight gradients of stage", stage) for stage in stages]  # type: ignore[misc]
    for ops, what, stage in rules:
        steps = enumerate(schedule.orders[rank])
        runs = [(i, a.microbatch) for i, s in steps for a in flatten((s,)) if a.op in ops and a.stage == stage]
        for (_, later), (index, earlier) in pairwise(runs):
            if later > earlier:
                reason = f"{what} {stage} run microbatch {later} before {earlier}; expected ascending order"
                raise schedule_error_at(f"{schedule.name}: rank {rank}: {reason}", schedule.orders, rank, index)


def _check_messages(schedule: Schedule) -> None:
    """Requires exactly the messages that the passes need, received on every channel in the order of the sends."""
    sent, received, expected = (defaultdict[tuple[int, int], list[Action]](list) for _ in range(3))
    for rank, order in enumerate(schedule.orders):
        routes = {key: route for key, route in routes_of(schedule, rank).items() if route[0] != route[1]}
        for (op, stage), (source, destination, target) in routes.items():
            if op in SENDS:
                receives = (Action(MESSAGE_OPS[op], target, m) for m in schedule.microbatches_of(stage, rank))
                expected[source, destination] += receives
        for index, step in enumerate(order):
            if step[0] in MESSAGES:
                op, stage, microbatch = step
                if (op, stage) not in routes:
                    reason = "no such stage here, or the other side is on the same rank"
                    raise _error_at(schedule, rank, index, f"{step} is not a message of this rank: {reason}")
                source, destination, target = routes[op, stage]  # type: ignore[index]
                messages, at = (sent, target) if op in SENDS else (received, stage)
                messages[source, destination].append(Action(MESSAGE_OPS[op], at, microbatch))  # type: ignore
    for channel in {**expected, **sent, **received}:
        for side, actual in (("sent", sent[channel]), ("received", received[channel])):
            if len(actual) != len(expected[channel]) or {*actual} != {*expected[channel]}:
                what = _difference(actual, expected[channel])
                raise ScheduleError(f"{schedule.name}: channel {channel[0]} -> {channel[1]}: {what} among those {side}")
        for place, (send, receive) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if send != receive:
                what = f"message {place} is that for {send}, but that for {receive} is posted for it"
                raise ScheduleError(f"{schedule.name}: channel {channel[0]} -> {channel[1]}: {what}")


def _difference(actions: Sequence[Step], expected: Sequence[Step]) -> str:
    """Returns the first action that is missing or too much."""
    for missing in Counter(expected) - Counter(actions):
        return f"{missing} is missing"
    return f"{next(iter(Counter(actions) - Counter(expected)))} is surplus"


def _check_collectives(schedule: Schedule) -> None:
    """Requires every collective once on every shard, and the exchanges around all other steps, all in one order."""
    shards = {schedule.rank_of(shard, 0): shard for shard in schedule.shards}
    kinds = collectives_of(schedule) if shards else ()
    exchanges = {step[0] for step in schedule.orders[0] if step[0] in EXCHANGES}
    first: list[tuple[Any, ...]] = []
    for rank, order in enumerate(schedule.orders):
        where = f"{schedule.name}: rank {rank}"
        posted = [step for step in order if step[0] in COLLECTIVES]
        expected = [Action(op, shards[rank], m) for op in kinds for m in range(schedule.microbatches) if rank in shards]
        if Counter(posted) != Counter(expected):
            raise ScheduleError(f"{where}: {_difference(posted, expected)} among the collectives of the shards")
        first = first or [(step[0], step[2]) for step in posted]  # type: ignore[misc]
        for step, place in zip(posted, first, strict=False):
            if (step[0], step[2]) != place:  # type: ignore[misc]
                what = f"{step} is posted where another rank posts {place[0]} of microbatch {place[1]}"
                raise schedule_error_at(f"{where}: {what}", schedule.orders, rank, order.index(step))
        within = [step for step in order if step[0] not in EXCHANGES]
        ops, due = ([step[0] for step in steps] for steps in (order, with_exchanges(rank, within, exchanges)))
        for index, (op, expected_op) in enumerate(zip_longest(ops, due)):
            if op != expected_op:
                what = "all ranks run the same exchanges, each once, in the order of the table, around all other steps"
                raise _error_at(schedule, rank, min(index, len(order) - 1), what)


def _receive_buffers(schedule: Schedule, rank: int) -> int:
    """Returns the most receives that are posted and whose consumer has not run yet."""
    change: dict[tuple[str, int], int] = {}
    for (op, stage), (source, destination, _) in routes_of(schedule, rank).items():
        if op in RECEIVES and source != destination:
            change[op, stage] = 1
            change |= {(user, stage): -1 for user in COMPUTE_OPS if result_of(user) == MESSAGE_OPS[op]}
    actions = flatten(schedule.orders[rank])
    return max(accumulate(change.get((op, stage), 0) for op, stage, _ in actions), default=0)
