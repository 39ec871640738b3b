"""Is this schedule, or this lowered program, right? One function per rule, errors with the grid around the culprit."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from zbcompile.schedules.checking.communication_rules import check_communication
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end, schedule_error_at
from zbcompile.schedules.execution.memory import first_beyond, peak_memory
from zbcompile.schedules.execution.order_graph import gc_disabled, require_stages, require_steps
from zbcompile.schedules.generators.forward_only import FORWARD_ONLY
from zbcompile.schedules.ir.actions import (
    BW,
    COMMUNICATION,
    COMPUTE,
    ONCE,
    PAIRED,
    Action,
    B,
    F,
    Pair,
    S,
    Step,
    W,
    flatten,
    has_pairs,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import KINDS, with_scope
from zbcompile.schedules.ir.schedule import Lowered, Schedule, parts

Done = int  # a bit for each operation that a microbatch has run on a stage
BITS: Mapping[str, Done] = {op: 1 << place for place, op in enumerate(KINDS)}
OWN_WEIGHT_ORDER = frozenset(("zb-h1-lazy",))  # declares another order of accumulation than that of the microbatches
WeightOrder = Literal["microbatch", "any"]


class Report(NamedTuple):
    """What `check` reports of a correct schedule, per rank.

    `peak_memory` is in the unit of `costs.activation`; `receive_buffers` is the largest number of receives that are
    posted and not yet consumed, `None` for a schedule that is not lowered.
    """

    peak_memory: tuple[float, ...]
    receive_buffers: tuple[int, ...] | None


@gc_disabled()
def check(
    program: Schedule | Lowered,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    weight_order: WeightOrder | None = None,
) -> Report:
    """Raise `ScheduleError` with the culprit shown unless `program` is right.

    A schedule: every microbatch runs F and B+W (or BW; F alone if it is forward-only) once on every stage, on the
    stage's rank, in an order that its dependencies allow; forwards of the last stage in the order of microbatches (per
    model copy), weight gradients too (`weight_order`; `None`: unless the schedule of this name declares otherwise);
    peak memory within `memory_limit` (unit of `costs.activation`, default 1 per stage). A lowered program as well: its
    messages are exactly those needed, none overtakes another on a channel, and it cannot deadlock even if every send
    waits for its receive.

    >>> from zbcompile.schedules import build
    >>> check(build("1f1b", ranks=2, microbatches=4)).peak_memory
    (2, 1)
    """
    schedule, _ = parts(program)
    costs = costs or Costs.uniform(schedule.stages)
    require_steps(schedule, schedule.orders)
    require_stages(schedule, costs)
    _check_copies(schedule)
    for rank, order in enumerate(schedule.orders):
        _check_pairs(schedule, rank, order)
        finished = _check_actions(schedule, rank, order)
        _check_once(schedule, rank, order)
        _check_sequences(schedule, rank, order, finished, weight_order)
    buffers = None
    if isinstance(program, Lowered):
        buffers = check_communication(program)
    else:
        run_to_end(schedule, Costs.uniform(schedule.stages))
    peaks = _check_memory(schedule, costs, memory_limit)
    return Report(peaks, buffers)


def _check_copies(schedule: Schedule) -> None:
    if schedule.placement.kind == "dual" and (schedule.ranks % 2 or schedule.microbatches % 2):
        counts = f"{schedule.ranks} ranks and {schedule.microbatches} microbatches"
        raise ScheduleError(f"{schedule.name}: {counts}; two model copies need an even number of both")


def _check_pairs(schedule: Schedule, rank: int, order: Sequence[Step]) -> None:
    if not has_pairs(order):
        return
    for index, step in enumerate(order):
        if isinstance(step, Pair) and (step.first.op, step.second.op) not in PAIRED:
            expected = "a pair is a forward F and a backward B or BW, or an F or B and a W"
            message = f"{schedule.name}: rank {rank}, step {index}: {expected}, not {step}"
            raise schedule_error_at(message, schedule.orders, rank, index)


def _check_actions(schedule: Schedule, rank: int, order: Sequence[Step]) -> Mapping[int, Sequence[int]]:
    """Check that nothing is missing or misplaced, and that on each stage F comes before B and B before W.

    Returns, for every stage of the rank, its microbatches in the order in which they were finished.
    """
    rules, last = _rules(schedule), BITS[W]
    own = schedule.placement.stages_of(rank)
    progress = {stage: dict.fromkeys(schedule.microbatches_of(stage, rank), 0) for stage in own}
    finished: dict[int, list[int]] = {stage: [] for stage in progress}
    index, action = 0, None
    try:
        for index, action in _numbered(schedule, order):  # noqa: B007 the error below uses them
            op, stage, microbatch = action
            looked_at, expected, does = rules[op]
            states = progress[stage]
            state = states[microbatch]
            if state & looked_at != expected:
                raise KeyError
            states[microbatch] = state | does
            if does & last:
                finished[stage].append(microbatch)
    except (KeyError, TypeError, ValueError):
        raise _wrong_action(schedule, rank, index, action, progress) from None
    for stage, states in progress.items():
        whole = _whole(schedule, stage)
        for microbatch, state in states.items():
            if state != whole:
                missing = next(op for op in KINDS if whole & ~state & BITS[op])
                names = " or ".join(op for op in KINDS if op in COMPUTE and KINDS[op].event == missing)
                what = f"rank {rank} never runs {names} of stage {stage}, microbatch {microbatch}"
                raise schedule_error_at(f"{schedule.name}: {what}", schedule.orders, rank, len(order) - 1)
    return finished


def _bits(ops: Iterable[str]) -> Done:
    return sum(BITS[op] for op in set(ops))


def _rules(schedule: Schedule) -> dict[str, tuple[Done, Done, Done]]:
    """For each operation: the bits to look at, which of them must already be set, and the bits that it sets."""
    ops = schedule.ops & COMPUTE - ONCE
    return {op: (_bits((*k.after, *k.does)), _bits(k.after), _bits(k.does)) for op in ops for k in (KINDS[op],)}


def _whole(schedule: Schedule, stage: int) -> Done:
    """What every microbatch runs on a stage: F, B and W (F alone in an evaluation), the further passes of this
    schedule, and a shard's passes if it has the shard (S alone in an evaluation)."""
    alone = schedule.name == FORWARD_ONLY
    passes = {F} if alone else {F, B, W}
    ops = passes | {op for op in schedule.ops & COMPUTE if KINDS[op].scope == "microbatch"}
    shard = () if stage not in schedule.shards else (S,) if alone else with_scope("shard")
    return _bits(done for op in (*ops, *shard) for done in KINDS[op].does)


def _numbered(schedule: Schedule, order: Sequence[Step]) -> Iterable[tuple[int, Any]]:
    """The actions that every microbatch has, with the index of their step."""
    if not has_pairs(order) and not schedule.ops & ONCE:
        return enumerate(order)
    opened = ((index, action) for index, step in enumerate(order) for action in flatten((step,)))
    return ((index, action) for index, action in opened if action[0] not in ONCE)


def _check_once(schedule: Schedule, rank: int, order: Sequence[Step]) -> None:
    """Check what runs once per stage: on every stage if on any, after what it needs, before what needs it."""
    own = schedule.placement.stages_of(rank)
    for op in schedule.ops & ONCE:
        for stage in own:
            actions = [(i, a) for i, step in enumerate(order) for a in flatten((step,)) if a.stage == stage]
            places = [i for i, a in actions if a == (op, stage, 0)]
            needed = [i for i, a in actions if {*KINDS[op].after} & {*KINDS[a.op].does}]
            serves = [i for i, a in actions if {*KINDS[op].before} & {*KINDS[a.op].does}]
            wrong = f"appears {len(places)} times" if len(places) != 1 else ""
            if not wrong and places[0] < max(needed, default=0):
                wrong = "comes before what it depends on"
            if not wrong and places[0] > min(serves, default=len(order)):
                wrong = f"comes after {order[min(serves)]}, which needs it"
            if wrong:
                expected = " and".join(
                    f" {word} all {', '.join(ops)}"
                    for word, ops in (("after", KINDS[op].after), ("before", KINDS[op].before))
                    if ops
                )
                text = f"{schedule.name}: rank {rank}: {Action(op, stage, 0)} {wrong}; expected once,{expected}"
                text = f"{text} of its stage"
                raise schedule_error_at(text, schedule.orders, rank, places[-1] if places else len(order) - 1)
        for index, step in enumerate(order):
            if step[0] == op and (step[1] not in own or step[2] != 0):
                text = f"{schedule.name}: rank {rank}: {step} is not of this rank, or its microbatch is not 0"
                raise schedule_error_at(text, schedule.orders, rank, index)


def _wrong_action(
    schedule: Schedule, rank: int, index: int, action: Any, progress: Mapping[int, Mapping[int, int]]
) -> ScheduleError:
    """The error for an action at a place where it may not run."""
    try:
        op, stage, microbatch = action
        reason = _why_wrong(schedule, rank, op, stage, microbatch, progress)
    except (TypeError, ValueError):
        reason = f"{action!r} is not an action; expected Action(op, stage, microbatch)"
    return schedule_error_at(f"{schedule.name}: rank {rank}, step {index}: {reason}", schedule.orders, rank, index)


def _why_wrong(
    schedule: Schedule, rank: int, op: str, stage: int, microbatch: int, progress: Mapping[int, Mapping[int, int]]
) -> str:
    name = f"{op}{stage}.{microbatch}"
    if op in COMMUNICATION:
        return f"{name} among the compute actions; SEND and RECV belong in a lowered program (see `lower`)"
    if op not in COMPUTE:
        return f"{name} has an unknown operation; expected one of {', '.join(sorted(COMPUTE))}"
    if stage not in range(schedule.stages):
        return f"{name} names stage {stage}; this schedule has stages 0 to {schedule.stages - 1}"
    if microbatch not in range(schedule.microbatches):
        return f"{name} names microbatch {microbatch}; this schedule has 0 to {schedule.microbatches - 1}"
    if microbatch not in progress.get(stage, {}):
        return f"{name} is on rank {rank}; its place is rank {schedule.rank_of(stage, microbatch)}"
    kind, done = KINDS[op], {other for other in KINDS if progress[stage][microbatch] & BITS[other]}
    if done.issuperset(kind.does):
        return f"{name} appears a second time (or after a BW that includes it)"
    if done & {*kind.does}:
        return f"{name} after B{stage}.{microbatch}; a backward is either split (B, W) or fused (BW)"
    missing = next(other for other in kind.after if other not in done)
    return f"{name} comes before {missing}{stage}.{microbatch}"


def _check_sequences(
    schedule: Schedule,
    rank: int,
    order: tuple[Step, ...],
    finished: Mapping[int, Sequence[int]],
    weight_order: WeightOrder | None,
) -> None:
    """Check that losses and weight gradients accumulate in the order of microbatches, which decides the bits."""
    promised = weight_order != "any" and (weight_order or schedule.name not in OWN_WEIGHT_ORDER)
    for stage, microbatches in finished.items():
        if promised:
            _require_ascending(schedule, rank, microbatches, f"weight gradients of stage {stage}", (W, BW), stage)
        if stage == schedule.stages - 1:
            forwards = [a.microbatch for a in flatten(order) if a.op == F and a.stage == stage]
            _require_ascending(schedule, rank, forwards, f"forwards of the last stage ({stage})", (F,), stage)


def _require_ascending(
    schedule: Schedule, rank: int, microbatches: Sequence[int], what: str, ops: tuple[str, ...], stage: int
) -> None:
    if list(microbatches) == sorted(microbatches):
        return
    place = next(i for i, (a, b) in enumerate(pairwise(microbatches), 1) if a > b)
    late, early = microbatches[place - 1], microbatches[place]
    message = f"{schedule.name}: rank {rank}: {what} run microbatch {late} before {early}; expected ascending order"
    wrong = {(op, stage, early) for op in ops}
    order = schedule.orders[rank]
    index = next(i for i, step in enumerate(order) if wrong & set(flatten((step,))))
    raise schedule_error_at(message, schedule.orders, rank, index)


def _check_memory(schedule: Schedule, costs: Costs, limit: float | None) -> tuple[float, ...]:
    peaks = peak_memory(schedule, costs)
    if limit is None:
        return peaks
    for rank, peak in enumerate(peaks):
        if peak > limit * (1 + 1e-9):  # sums of floats differ in their last bits with the order of the additions
            index = first_beyond(schedule.orders[rank], costs, limit)
            message = f"{schedule.name}: rank {rank} needs {peak} of memory; the limit is {limit}, exceeded here"
            raise schedule_error_at(message, schedule.orders, rank, index)
    return peaks
