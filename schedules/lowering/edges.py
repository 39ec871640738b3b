"""Who makes, needs and sends each value of a step: the one table that plans, records and memory figures read."""

from collections.abc import Mapping
from typing import NamedTuple

from zbcompile.schedules.ir.actions import RECEIVES, SENDS, Action, B, F, S, T, flatten
from zbcompile.schedules.ir.dependencies import (
    awaited,
    receives_before,
    sends_after,
    source,
    target,
    travels_as,
)
from zbcompile.schedules.ir.kinds import result_of
from zbcompile.schedules.ir.schedule import Schedule

# Messages between stages and vocabulary shards: the last stage's output and its gradient, the gradient of what the
# shards have looked up for the first stage.
HIDDEN_MESSAGE, GRADIENT_MESSAGE, ROWS_MESSAGE = "HIDDEN", "GRADIENT", "ROWS"


class Message(NamedTuple):
    """The `F` or `B` values that arrive at `stage` for `microbatch`; or what a collective of the vocabulary passes
    takes from there or brings there."""

    kind: str
    stage: int
    microbatch: int


class Edge(NamedTuple):
    """The values of an action. A compute action waits for `needs` and makes messages, each for a rank; a SEND `carries`
    one to `peer`, a RECV one from there."""

    needs: tuple[Message, ...] = ()
    makes: tuple[tuple[Message, int], ...] = ()
    carries: Message | None = None
    peer: int = -1


def edges_of(schedule: Schedule, rank: int) -> dict[Action, Edge]:
    """The edges of all actions of a rank, in their order.

    >>> from zbcompile.schedules import build, lower
    >>> edge = edges_of(lower(build("1f1b", ranks=2, microbatches=1)), 1)[Action("BW", 1, 0)]
    >>> edge.needs, edge.makes
    ((), ((Message(kind='B', stage=0, microbatch=0), 0),))
    """
    collectives = awaited(schedule, lowered=True) if schedule.shards else {}
    return {action: _edge(schedule, action, collectives) for action in flatten(schedule.orders[rank])}


def _edge(schedule: Schedule, action: Action, collectives: Mapping[tuple[str, int], str]) -> Edge:
    op, stage, microbatch = action
    if op in RECEIVES and (before := source(op, stage, schedule.stages)) is not None:
        return Edge(carries=_carried(op, stage, microbatch), peer=schedule.rank_of(before, microbatch))
    if op in SENDS and (there := target(op, stage, schedule.stages)) is not None:
        return Edge(carries=_carried(op, there, microbatch), peer=schedule.rank_of(there, microbatch))
    needs = [_carried(receive, stage, microbatch) for receive in receives_before(schedule, op, stage)]
    if (op, stage) in collectives:
        kind = GRADIENT_MESSAGE if result_of(op) == B else collectives[op, stage]
        needs.append(Message(kind, stage, microbatch))
    targets = [(send, target(send, stage, schedule.stages)) for send in sends_after(schedule, op, stage)]
    made = [_carried(send, there, microbatch) for send, there in targets if there is not None]
    handed = _handed_over(schedule, action) if schedule.shards and not made else None
    made += [handed] if handed else []
    return Edge(tuple(needs), tuple((message, schedule.rank_of(message.stage, microbatch)) for message in made))


def _carried(op: str, stage: int, microbatch: int) -> Message:
    """What a SEND or RECV brings to a stage."""
    return Message(travels_as(op), stage, microbatch)


def _handed_over(schedule: Schedule, action: Action) -> Message | None:
    """What a collective of the vocabulary passes takes: results of the last stage's forward, of the first one's
    backward, of S, and with two barriers of T."""
    op, stage, microbatch = action
    if op == F and stage == schedule.stages - 1:
        return Message(HIDDEN_MESSAGE, stage, microbatch)
    if result_of(op) == B and stage == 0 and schedule.lookups:
        return Message(ROWS_MESSAGE, stage, microbatch)
    if op == S or (op == T and schedule.barriers == 2):
        return Message(op, stage, microbatch)
    return None
