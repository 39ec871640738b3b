"""Proves that a schedule is complete, legal, free of deadlock and within its memory.

What each rank runs is counted, its messages are compared with those that its passes need, and one run of the order
graph proves the rest. Errors show the grid around the culprit.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end, schedule_error_at
from zbcompile.schedules.execution.memory import first_beyond, peak_memory
from zbcompile.schedules.execution.order_graph import gc_disabled, require_stages, require_steps
from zbcompile.schedules.generators.forward_only import FORWARD_ONLY
from zbcompile.schedules.ir.actions import (
    BW,
    COMPUTE,
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
    T,
    W,
    flatten,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, OPTIMIZER_OPS, result_of, work_of
from zbcompile.schedules.ir.schedule import Schedule, require_schedule
from zbcompile.schedules.lowering.collectives import check_collectives
from zbcompile.schedules.lowering.routes import Channel, routes_of
from zbcompile.schedules.lowering.updates import check_exchanges

OWN_WEIGHT_ORDER = frozenset(("zb-h1-lazy",))  # declares another order of accumulation than that of the microbatches
WeightOrder = Literal["microbatch", "any"]
Message = tuple[str, int, int]  # the receive that it ends in, its stage and microbatch


class Report(NamedTuple):
    """What `check` reports of a correct schedule, per rank.

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
    needed, none overtakes another on a channel, and it cannot deadlock even if every send waits for its receive.

    >>> from zbcompile.schedules import build
    >>> check(build("1f1b", ranks=2, microbatches=4)).peak_memory
    (2, 1)
    """
    require_schedule(schedule)
    costs = costs or Costs.uniform(schedule.stages)
    require_steps(schedule)
    require_stages(schedule, costs)
    if schedule.placement.kind == "dual" and (schedule.ranks % 2 or schedule.microbatches % 2):
        counts = f"{schedule.ranks} ranks and {schedule.microbatches} microbatches"
        raise ScheduleError(f"{schedule.name}: {counts}; two model copies need an even number of both")
    compute = schedule.compute_only()
    for rank in range(schedule.ranks):
        _check_passes(compute, rank)
        _check_once(compute, rank)
        _check_accumulation(compute, rank, weight_order)
    if schedule.is_lowered:
        _check_messages(schedule)
        check_collectives(schedule)
        check_exchanges(schedule)
    run_to_end(schedule, Costs.uniform(schedule.stages))
    buffers = tuple(_receive_buffers(schedule, rank) for rank in range(schedule.ranks)) if schedule.is_lowered else None
    return Report(_check_memory(compute, costs, memory_limit), buffers)


def _check_passes(schedule: Schedule, rank: int) -> None:
    """Requires every pass of the rank once, F before B before W."""
    order, stages = schedule.orders[rank], schedule.placement.stages_of(rank)
    ran = {stage: dict.fromkeys(schedule.microbatches_of(stage, rank), 0) for stage in stages}  # bits of _BITS
    action: object = None
    for index, step in enumerate(order):
        if isinstance(step, Pair) and (step.first.op, step.second.op) not in PAIRED:
            reason = f"a pair is a forward F and a backward B or BW, or an F or B and a W, not {step}"
            raise _error_at(schedule, rank, index, reason)
        for action in step if isinstance(step, Pair) else (step,):
            try:
                op, stage, microbatch = action  # type: ignore[misc]
                if op in ONCE:
                    continue
                looked_at, needed, does = _RULES[op]
                states = ran[stage]
                if states[microbatch] & looked_at != needed:
                    raise KeyError
                states[microbatch] |= does
            except (KeyError, TypeError, ValueError):
                raise _error_at(schedule, rank, index, _why_wrong(schedule, rank, action, ran)) from None
    alone = schedule.name == FORWARD_ONLY
    for stage, states in ran.items():
        shard = () if stage not in schedule.shards else (S,) if alone else (S, T)
        whole = _bits((F, *shard) if alone else (F, B, W, *shard))
        for microbatch, state in states.items():
            if state != whole:
                missing = next((op for op, bit in _BITS.items() if whole & ~state & bit), None)
                names = " or ".join(op for op in _RULES if result_of(op) == missing)
                what = f"rank {rank} never runs {names} of stage {stage}, microbatch {microbatch}"
                if missing is None:
                    what = f"rank {rank} runs passes of stage {stage}, microbatch {microbatch} that it does not have"
                raise schedule_error_at(f"{schedule.name}: {what}", schedule.orders, rank, len(order) - 1)


def _bits(ops: Collection[str]) -> int:
    return sum(_BITS[op] for op in ops)


_BITS = {op: 1 << place for place, op in enumerate((F, B, W, S, T))}
# For each pass: the bits to look at, which of them must be set, and those that it sets.
_RULES = {
    op: (_bits({*each.after, *each.does}), _bits(each.after), _bits(each.does)) for op, each in COMPUTE_OPS.items()
}


def _error_at(schedule: Schedule, rank: int, index: int, reason: str) -> ScheduleError:
    return schedule_error_at(f"{schedule.name}: rank {rank}, step {index}: {reason}", schedule.orders, rank, index)


def _why_wrong(schedule: Schedule, rank: int, action: object, ran: Mapping[int, Mapping[int, int]]) -> str:
    if not isinstance(action, Action) or not all(isinstance(each, int) for each in action[1:]):
        return f"{action!r} is not an action; expected Action(op, stage, microbatch)"
    op, stage, microbatch = action
    if op not in _RULES:
        return f"{action} has an unknown operation; expected one of {', '.join(sorted(COMPUTE))}"
    if stage not in range(schedule.stages):
        return f"{action} names stage {stage}; this schedule has stages 0 to {schedule.stages - 1}"
    if microbatch not in range(schedule.microbatches):
        return f"{action} names microbatch {microbatch}; this schedule has 0 to {schedule.microbatches - 1}"
    if microbatch not in ran.get(stage, {}):
        return f"{action} is on rank {rank}; its place is rank {schedule.rank_of(stage, microbatch)}"
    state, (_, needed, does) = ran[stage][microbatch], _RULES[op]
    if state & does == does:
        return f"{action} appears a second time (or after a BW that includes it)"
    if state & does:
        return f"{action} after B{stage}.{microbatch}; a backward is either split (B, W) or fused (BW)"
    missing = next(other for other, bit in _BITS.items() if needed & ~state & bit)
    return f"{action} comes before {missing}{stage}.{microbatch}"


def _check_once(schedule: Schedule, rank: int) -> None:
    """Requires the optimizer's actions on every stage if on any, after what they need, before what needs them."""
    order, own, once = schedule.orders[rank], schedule.placement.stages_of(rank), schedule.ops & ONCE
    actions = [(index, action) for index, step in enumerate(order) for action in flatten((step,))] if once else []
    for op in once:
        for stage in own:
            places = [i for i, a in actions if a == (op, stage, 0)]
            needed = [i for i, a in actions if a.stage == stage and {*OPTIMIZER_OPS[op].after} & {*work_of(a.op)}]
            serves = [i for i, a in actions if a.stage == stage and {*OPTIMIZER_OPS[op].before} & {*work_of(a.op)}]
            wrong = f"appears {len(places)} times" if len(places) != 1 else ""
            if not wrong and places[0] < max(needed, default=0):
                wrong = "comes before what it depends on"
            if not wrong and places[0] > min(serves, default=len(order)):
                wrong = f"comes after {order[min(serves)]}, which needs it"
            if wrong:
                rules = (("after", OPTIMIZER_OPS[op].after), ("before", OPTIMIZER_OPS[op].before))
                expected = " and".join(f" {word} all {', '.join(ops)}" for word, ops in rules if ops)
                text = f"{Action(op, stage, 0)} {wrong}; expected once,{expected} of its stage"
                raise _error_at(schedule, rank, places[-1] if places else len(order) - 1, text)
        strays = [i for i, a in actions if a.op == op and (a.stage not in own or a.microbatch != 0)]
        if strays:
            text = f"{order[strays[0]]} is not of this rank, or its microbatch is not 0"
            raise _error_at(schedule, rank, strays[0], text)


def _check_accumulation(schedule: Schedule, rank: int, weight_order: WeightOrder | None) -> None:
    """Requires losses and weight gradients in the order of microbatches, which decides the bits."""
    ordered = weight_order != "any" and (weight_order or schedule.name not in OWN_WEIGHT_ORDER)
    for ops, what in (((W, BW), "weight gradients of stage"), ((F,), "forwards of the last stage")):
        for stage in schedule.placement.stages_of(rank):
            if (stage != schedule.stages - 1) if F in ops else not ordered:
                continue
            steps = enumerate(schedule.orders[rank])
            runs = [(i, a.microbatch) for i, s in steps for a in flatten((s,)) if a.op in ops and a.stage == stage]
            for (_, late), (index, early) in pairwise(runs):
                if late > early:
                    reason = f"{what} {stage} run microbatch {late} before {early}; expected ascending order"
                    raise schedule_error_at(f"{schedule.name}: rank {rank}: {reason}", schedule.orders, rank, index)


def _check_messages(schedule: Schedule) -> None:
    """Requires exactly the messages that the passes need, received on every channel in the order of the sends."""
    sent, received, expected = (defaultdict[Channel, list[Message]](list) for _ in range(3))
    for rank, order in enumerate(schedule.orders):
        routes = routes_of(schedule, rank)
        for (op, stage), (channel, receive, at) in routes.items():
            if op in SENDS:
                expected[channel] += [(receive, at, m) for m in schedule.microbatches_of(stage, rank)]
        for index, step in enumerate(order):
            if step[0] in MESSAGES:
                op, stage, microbatch = step
                route = routes.get((op, stage))  # type: ignore[arg-type]
                if route is None:
                    reason = "no such stage here, or the other side is on the same rank"
                    raise _error_at(schedule, rank, index, f"{step} is not a message of this rank: {reason}")
                lane = (sent if op in SENDS else received)[route.channel]
                lane.append((route.receive, route.stage, microbatch))  # type: ignore[arg-type]
    for channel in {**expected, **sent, **received}:
        there, here, due = sent[channel], received[channel], expected[channel]
        if there != here or len(there) != len(due) or set(there) != set(due):
            raise ScheduleError(f"{schedule.name}: channel {channel[0]} -> {channel[1]}: {_fault(there, here, due)}")


def _fault(sent: Sequence[Message], received: Sequence[Message], due: Sequence[Message]) -> str:
    for what, found in (("SEND", sent), ("RECV", received)):
        missing, surplus = Counter(due) - Counter(found), Counter(found) - Counter(due)
        for message, problem in ((next(iter(missing), None), "is missing"), (next(iter(surplus), None), "is surplus")):
            if message is not None:
                return f"the {what} of {Action(*message)} {problem}"
    place = next(i for i, (one, other) in enumerate(zip(sent, received, strict=True)) if one != other)
    return f"message {place} is {Action(*sent[place])}, but {Action(*received[place])} is posted for it"


def _receive_buffers(schedule: Schedule, rank: int) -> int:
    """Returns the most receives that are posted and whose consumer has not run yet."""
    change: dict[tuple[str, int], int] = {}
    for op, stage in routes_of(schedule, rank):
        if op in RECEIVES:
            change[op, stage] = 1
            for user in COMPUTE_OPS:
                if result_of(user) == MESSAGE_OPS[op].payload:
                    change[user, stage] = change.get((user, stage), 0) - 1
    actions = flatten(schedule.orders[rank])
    return max(accumulate(change.get((op, stage), 0) for op, stage, _ in actions), default=0)


def _check_memory(schedule: Schedule, costs: Costs, limit: float | None) -> tuple[float, ...]:
    peaks = peak_memory(schedule, costs)
    for rank, peak in enumerate(peaks if limit is not None else ()):
        if peak > limit * (1 + 1e-9):  # type: ignore[operator]  # sums of floats differ in their last bits
            index = first_beyond(schedule.orders[rank], costs, limit)  # type: ignore[arg-type]
            message = f"{schedule.name}: rank {rank} needs {peak} of memory; the limit is {limit}, exceeded here"
            raise schedule_error_at(message, schedule.orders, rank, index)
    return peaks
