"""Who makes, needs and sends each value of a step: the one table that plans, records and memory figures read."""

from collections.abc import Mapping
from typing import NamedTuple

from zbcompile.schedules.ir.actions import RECEIVES, SENDS, Action, B, F, S, T, flatten
from zbcompile.schedules.ir.dependencies import awaited, source, target, travels_as
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Lowered, Schedule

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
    """The values of an action. A compute action waits for `needs` and `makes` a message for rank `peer`; a SEND
    `carries` one to `peer`, a RECV one from there."""

    needs: Message | None = None
    makes: Message | None = None
    carries: Message | None = None
    peer: int = -1


def edges_of(lowered: Lowered, rank: int) -> dict[Action, Edge]:
    """The edges of all actions of a rank, in their order.

    >>> from zbcompile.schedules import build, lower
    >>> edge = edges_of(lower(build("1f1b", ranks=2, microbatches=1)), 1)[Action("BW", 1, 0)]
    >>> edge.needs, edge.makes, edge.peer
    (None, Message(kind='B', stage=0, microbatch=0), 0)
    """
    schedule = lowered.schedule
    collectives = awaited(schedule, lowered=True) if schedule.shards else {}
    return {action: _edge(schedule, action, collectives) for action in flatten(lowered.programs[rank])}


def _edge(schedule: Schedule, action: Action, collectives: Mapping[tuple[str, int], str]) -> Edge:
    op, stage, microbatch = action
    before, behind = source(op, stage, schedule.stages), target(op, stage, schedule.stages)
    arrives = None if before is None else Message(travels_as(op), stage, microbatch)
    leaves = None if behind is None else Message(travels_as(op), behind, microbatch)
    if op in RECEIVES and before is not None:
        return Edge(carries=arrives, peer=schedule.rank_of(before, microbatch))
    if op in SENDS and behind is not None:
        return Edge(carries=leaves, peer=schedule.rank_of(behind, microbatch))
    if (op, stage) in collectives:
        kind = GRADIENT_MESSAGE if KINDS[op].event == B else collectives[op, stage]
        arrives = Message(kind, stage, microbatch)
    leaves = leaves or (_handed_over(schedule, action) if schedule.shards else None)
    peer = schedule.rank_of(leaves.stage, microbatch) if leaves else -1
    return Edge(arrives, leaves, peer=peer)


def _handed_over(schedule: Schedule, action: Action) -> Message | None:
    """What a collective of the vocabulary passes takes: results of the last stage's forward, of the first one's
    backward, of S, and with two barriers of T."""
    op, stage, microbatch = action
    if op == F and stage == schedule.stages - 1:
        return Message(HIDDEN_MESSAGE, stage, microbatch)
    if KINDS[op].event == B and stage == 0 and schedule.lookups:
        return Message(ROWS_MESSAGE, stage, microbatch)
    if op == S or (op == T and schedule.barriers == 2):
        return Message(op, stage, microbatch)
    return None
