"""From compute orders to programs: where every SEND and RECV goes, safe even when every send blocks (rendezvous).

Run the orders once with messages that are buffered without limit: every compute action X gets a begin and an end. Then

* SEND(X) stands right after X;
* RECV(X) stands on the receiving rank before the action that runs when X begins: early enough that the sender finds it
  posted and the transfer hides behind computation, late enough that at most one producer's duration of receives is open
  beyond what is in flight anyway.

Why this cannot deadlock: number RECV(X) with X's begin, SEND(X) with X's end, compute with its own begin. Whatever
can wait in front of RECV(X) on its rank began before X did, a consumer begins no earlier than X ends, and times are
positive: so every wait (send for receive, compute for send, next for previous on a rank) is for a smaller number. As
the producers on one rank begin in the order in which they send, each channel's receives are posted in that order.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, cast

from zbcompile.schedules.actions import (
    BW,
    COMPUTE,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    B,
    F,
    Step,
    flatten,
)
from zbcompile.schedules.costs import Costs
from zbcompile.schedules.deadlock import require_finished
from zbcompile.schedules.engine import Run, has_pairs, run
from zbcompile.schedules.schedule import Lowered, Schedule

Messages = list[list[Action] | None]  # by the index of a step


class Peer(NamedTuple):
    """Where the results of one operation on one stage go, and the ready-made actions by microbatch."""

    rank: int
    sends: list[Action]
    receives: list[Action]


def lower(schedule: Schedule, costs: Costs | None = None) -> Lowered:
    """Place SEND and RECV actions in every rank's order.

    `costs` (default: uniform) only say when each receive will be needed; whatever they are, the program is safe.
    Raises `ScheduleError` if the orders wait for each other in a circle, which no placement of messages can mend.

    >>> from zbcompile.schedules import build
    >>> " ".join(map(str, lower(build("1f1b", ranks=2, microbatches=1)).programs[0]))
    'F0.0 RECV_B0.0 SEND_F0.0 BW0.0'
    """
    outcome = run(schedule, _positive(costs or Costs.uniform(schedule.stages)))
    require_finished(schedule, outcome)
    posts: list[Messages] = [[None] * len(order) for order in schedule.orders]
    sends = [_place_messages(schedule, rank, outcome, posts) for rank in range(schedule.ranks)]
    return Lowered(schedule, tuple(map(_interleave, schedule.orders, posts, sends)))


def _positive(costs: Costs) -> Costs:
    """The costs with every pass that takes no time made very short: the proof above needs positive times."""
    times = {op: getattr(costs, op) for op in ("forward", "backward", "weight", "vocab_s", "vocab_t")}
    tiny = min((t for values in times.values() for t in values if t > 0), default=1) / 1024
    pairs = tuple(pair._replace(time=pair.time or tiny) for pair in costs.pairs)
    return replace(costs, pairs=pairs, **{op: tuple(t or tiny for t in values) for op, values in times.items()})


def _place_messages(schedule: Schedule, rank: int, outcome: Run, posts: list[Messages]) -> Messages:
    """The sends after each step of `rank`; their receives are entered into `posts` of the receiving ranks."""
    order, begins = schedule.orders[rank], outcome.begin[rank]
    peers = _peers(schedule, rank)
    reached = dict.fromkeys((peer.rank for stages in peers.values() for peer in stages.values()), 0)
    sends: Messages = [None] * len(order)
    for index, (op, stage, microbatch) in _numbered(order):
        peer = peers[op].get(stage)
        if peer is None:
            continue
        there, begin = peer.rank, begins[index]
        place = bisect_left(outcome.begin[there], begin, reached[there])
        if place and outcome.end[there][place - 1] > begin:
            place -= 1
        reached[there] = place
        _append(posts[there], place, peer.receives[microbatch])
        _append(sends, index, peer.sends[microbatch])
    return sends


def _append(messages: Messages, index: int, action: Action) -> None:
    present = messages[index]
    if present is None:
        messages[index] = [action]
    else:
        present.append(action)


def _numbered(order: Sequence[Step]) -> Iterable[tuple[int, Action]]:
    """The actions with the index of their step."""
    if has_pairs(order):
        return ((i, action) for i, step in enumerate(order) for action in flatten((step,)))
    return enumerate(cast(Sequence[Action], order))


def _peers(schedule: Schedule, rank: int) -> dict[str, dict[int, Peer]]:
    """By operation and stage; nothing is sent within a rank."""
    peers: dict[str, dict[int, Peer]] = {op: {} for op in COMPUTE}
    for stage in schedule.placement.stages_of(rank):
        copy = int(schedule.placement.rank(stage) != rank)
        forward = _peer(schedule, rank, copy, stage, stage + 1, (SEND_F, RECV_F))
        backward = _peer(schedule, rank, copy, stage, stage - 1, (SEND_B, RECV_B))
        if forward:
            peers[F][stage] = forward
        if backward:
            peers[B][stage] = peers[BW][stage] = backward
    return peers


def _peer(schedule: Schedule, rank: int, copy: int, stage: int, target: int, ops: tuple[str, str]) -> Peer | None:
    if not 0 <= target < schedule.stages or schedule.placement.rank(target, copy) == rank:
        return None
    send, receive = ops
    microbatches = range(schedule.microbatches)
    sends = [Action(send, stage, m) for m in microbatches]
    receives = [Action(receive, target, m) for m in microbatches]
    return Peer(schedule.placement.rank(target, copy), sends, receives)


def _interleave(order: Sequence[Step], posts: Messages, sends: Messages) -> tuple[Step, ...]:
    """Steps with the receives in front of them; sends follow their step, after the receives of the next."""
    program: list[Step] = []
    for step, received, sent in zip(order, posts, chain((None,), sends), strict=False):
        if received is not None:
            program += received
        if sent is not None:
            program += sent
        program.append(step)
    if sends and sends[-1] is not None:
        program += sends[-1]
    return tuple(program)
