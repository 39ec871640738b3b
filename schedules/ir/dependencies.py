"""Dependencies: the one place that knows that F goes down the pipeline and B back up, and what W, S and T wait for.

The tables of `zbcompile.schedules.ir.kinds` say everything else about operations.
"""

from functools import cache
from typing import NamedTuple

from zbcompile.schedules.ir.actions import BW, CAST, LOOKUP, STATS, SUM, B, F, S, T, W
from zbcompile.schedules.ir.kinds import COLLECTIVE_OPS, COMPUTE_OPS, MESSAGE_OPS, message_op, result_of
from zbcompile.schedules.ir.schedule import Schedule

ALONG = {F: 1, B: -1}  # whose results go down the pipeline, from stage to stage + 1, and up
TRAVELS = {op: ALONG.get(result_of(op), 0) for op in COMPUTE_OPS}
TRAVELS |= {op: ALONG[message.payload] for op, message in MESSAGE_OPS.items()}
SEND_OF = {payload: message_op("SEND", payload) for payload in ALONG}
RECEIVE_OF = {payload: message_op("RECV", payload) for payload in ALONG}


def source(op: str, stage: int, stages: int) -> int | None:
    """The stage whose result `op` on `stage` needs, or receives; None at the start of its way and for results that do
    not travel.

    >>> source("F", 2, 4), source("BW", 2, 4), source("RECV_B", 2, 4), source("F", 0, 4), source("W", 2, 4)
    (1, 3, 3, None, None)
    """
    return _beside(stage, -TRAVELS.get(op, 0), stages)


def target(op: str, stage: int, stages: int) -> int | None:
    """The stage that needs what `op` on `stage` makes, or sends; None at the end of its way and for results that do
    not travel.

    >>> target("F", 2, 4), target("BW", 2, 4), target("SEND_B", 2, 4), target("F", 3, 4)
    (3, 1, 1, None)
    """
    return _beside(stage, TRAVELS.get(op, 0), stages)


def _beside(stage: int, step: int, stages: int) -> int | None:
    return stage + step if step and 0 <= stage + step < stages else None


def travels_as(op: str) -> str:
    """The operation that names what `op` needs from, makes for or carries to another stage.

    >>> travels_as("BW"), travels_as("SEND_B"), travels_as("F")
    ('B', 'B', 'F')
    """
    return MESSAGE_OPS[op].payload if op in MESSAGE_OPS else result_of(op)


def sends_after(schedule: Schedule, op: str, stage: int) -> tuple[str, ...]:
    """The message in which the results of `op` on `stage` leave for another stage, if any.

    >>> from zbcompile.schedules import build
    >>> sends_after(build("1f1b", ranks=4, microbatches=1), "BW", 2)
    ('SEND_B',)
    """
    return _messages(schedule, "SEND", result_of(op), stage)


def receives_before(schedule: Schedule, op: str, stage: int) -> tuple[str, ...]:
    """The message that brings what `op` on `stage` needs from another stage, if any."""
    return _messages(schedule, "RECV", result_of(op), stage)


def _messages(schedule: Schedule, direction: str, event: str, stage: int) -> tuple[str, ...]:
    if event not in SEND_OF:
        return ()
    neighbour = (target if direction == "SEND" else source)(event, stage, schedule.stages)
    return () if neighbour is None else (message_op(direction, event),)


def other_end(op: str) -> str:
    """The receive of a send, and the send of a receive.

    >>> other_end("SEND_F"), other_end("RECV_B")
    ('RECV_F', 'SEND_B')
    """
    return op.replace("SEND", "RECV") if op.startswith("SEND") else op.replace("RECV", "SEND")


class Need(NamedTuple):
    """The result of an operation on a stage, for the same microbatch."""

    op: str
    stage: int


@cache
def needs(op: str, stage: int, stages: int) -> tuple[Need, ...]:
    """What a compute action or a collective waits for, apart from what every vocabulary shard must have done.

    >>> needs("F", 0, 4), needs("B", 3, 4), needs("B", 2, 4)
    ((), (Need(op='F', stage=3),), (Need(op='B', stage=3),))
    >>> needs("W", 1, 4), needs("S", 1, 4)
    ((Need(op='B', stage=1),), (Need(op='F', stage=3),))
    """
    if op in COLLECTIVE_OPS:
        payload = COLLECTIVE_OPS[op].payload
        return (Need(payload, {F: stages - 1, B: 0}.get(payload, stage)),) if payload else ()
    if op == S:
        return (Need(F, stages - 1),)
    before = source(op, stage, stages)
    after = COMPUTE_OPS[op].after
    return tuple(Need(other, stage) for other in after) if before is None else (Need(result_of(op), before),)


@cache
def users(op: str, stage: int, stages: int) -> tuple[Need, ...]:
    """The split passes that wait for `op` on `stage`: the inverse of `needs`.

    >>> users("F", 3, 4), [tuple(each) for each in users("B", 2, 4)]
    ((Need(op='B', stage=3),), [('B', 1), ('W', 2)])
    """
    around = [Need(other, at) for other in (F, B, W) for at in (stage - 1, stage, stage + 1) if 0 <= at < stages]
    return tuple(each for each in around if (op, stage) in needs(*each, stages))


def awaited(schedule: Schedule, lowered: bool) -> dict[tuple[str, int], str]:
    """What of EVERY shard an operation on a stage waits for: the operation that makes it, or in a lowered program its
    collective, which is complete when every shard has posted it."""
    reduced = {1: (S, STATS), 2: (T, SUM)}[schedule.barriers][lowered]
    found = {(op, schedule.stages - 1): reduced for op in (B, BW)}
    found |= {(T, shard): STATS if lowered else S for shard in schedule.shards}
    if lowered:
        found |= {(S, shard): CAST for shard in schedule.shards}
    return found | {(F, 0): LOOKUP} if lowered and schedule.lookups else found


def count_messages(schedule: Schedule) -> int:
    """The number of messages between ranks in a step, forward and backward."""
    rank, stages = schedule.placement.rank, schedule.stages
    sends = ((s, send) for op in SEND_OF for s in range(stages) for send in sends_after(schedule, op, s))
    targets = ((s, target(send, s, stages)) for s, send in sends)
    return schedule.microbatches * sum(there is not None and rank(s) != rank(there) for s, there in targets)
