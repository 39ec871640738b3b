"""From compute orders to programs: where every SEND, RECV and collective goes.

It is safe even when every send blocks until its receive is posted (rendezvous).

Run the orders once with messages that are buffered without limit: every compute action X gets a start and an end. Then

* SEND(X) stands right after X;
* RECV(X) stands on the receiving rank before the action that runs when X begins: early enough that the sender finds it
  posted and the transfer hides behind computation, late enough that at most one producer's duration of receives is open
  beyond what is in flight anyway.

Why this cannot deadlock: number RECV(X) with X's start, SEND(X) with X's end, compute with its own start. Whatever
can wait in front of RECV(X) on its rank began before X did, a consumer begins no earlier than X ends, and times are
positive: so every wait (send for receive, compute for send, next for previous on a rank) is for a smaller number. As
the producers on one rank begin in the order in which they send, each channel's receives are posted in that order.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.order_graph import NodeTimes, OrderGraph, gc_disabled, require_steps
from zbcompile.schedules.ir.actions import COMPUTE, Action, Pair, Step, flatten, has_pairs
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import other_end, sends_after, target
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, result_of
from zbcompile.schedules.ir.schedule import Schedule, require_schedule
from zbcompile.schedules.lowering.collectives import Posts, post_collectives


class Peer(NamedTuple):
    """A rank that gets results of one operation on one stage, and the ready-made actions by microbatch."""

    rank: int
    sends: list[Action]
    receives: list[Action]


Peers = dict[str, dict[int, tuple[Peer, ...]]]  # by operation, then by stage


@gc_disabled()
def lower(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns the schedule with SEND, RECV and (with vocabulary passes) collective actions in every rank's order.

    `costs` (default: uniform) only say when each receive will be needed; whatever they are, the result is safe.
    Messages that the orders have already are placed again.

    Raises `ScheduleError` if the orders wait for each other in a circle, which no placement of messages can resolve.

    >>> from zbcompile.schedules import build
    >>> " ".join(map(str, lower(build("1f1b", ranks=2, microbatches=1)).orders[0]))
    'F0.0 RECV_B0.0 SEND_F0.0 BW0.0'
    """
    require_schedule(schedule)
    require_steps(schedule)
    schedule = schedule.compute_only()
    graph, run = run_to_end(schedule, _positive(costs or Costs.uniform(schedule.stages)))
    microbatches = tuple(range(schedule.microbatches))  # one object per number, not one per action
    peers = [_peers(schedule, rank, microbatches) for rank in range(schedule.ranks)]
    posts: list[Posts] = [[None] * (len(order) + 1) for order in schedule.orders]
    for rank, order in enumerate(schedule.orders):
        _post_receives(order, graph, run, peers[rank], rank, posts)
    if schedule.shards:
        post_collectives(graph, run, posts)
    return replace(schedule, orders=tuple(map(_interleave, schedule.orders, peers, posts)))


def _positive(costs: Costs) -> Costs:
    """The costs, in which a pass of no time takes a very short one: the proof above needs positive times."""
    times = {name: getattr(costs, name) for each in COMPUTE_OPS.values() for name in each.time}
    tiny = min((t for values in times.values() for t in values if t > 0), default=1) / 1024
    positive: dict[str, Any] = {op: tuple(t or tiny for t in values) for op, values in times.items()}
    return replace(costs, **positive)


def _post_receives(
    order: Sequence[Step], graph: OrderGraph, run: NodeTimes, peers: Peers, rank: int, posts: Sequence[Posts]
) -> None:
    """Enters the receives of everything that one rank sends into the `posts` of the receiving ranks."""
    first, start, end = graph.first, run.start, run.end
    reached = {p.rank: first[p.rank] for stages in peers.values() for found in stages.values() for p in found}
    for begin, (op, stage, microbatch) in _timed(order, start[first[rank] : first[rank + 1]]):
        for peer in peers[op].get(stage, ()):
            there = peer.rank
            place = bisect_left(start, begin, reached[there], first[there + 1])
            if place > first[there] and end[place - 1] > begin:
                place -= 1
            reached[there] = place
            place -= first[there]
            present = posts[there][place]
            if present is None:
                posts[there][place] = [peer.receives[microbatch]]
            else:
                present.append(peer.receives[microbatch])


def _timed(order: Sequence[Step], begins: Sequence[float]) -> Iterable[tuple[float, Action]]:
    """The actions with the begin of their step."""
    if not has_pairs(order):
        return zip(begins, cast(Sequence[Action], order), strict=True)
    return ((begin, action) for begin, step in zip(begins, order, strict=True) for action in flatten((step,)))


def _peers(schedule: Schedule, rank: int, microbatches: Sequence[int]) -> Peers:
    """The ranks to which a rank sends, by operation and stage; nothing is sent within a rank."""
    peers: Peers = {op: {} for op in COMPUTE}
    for stage in schedule.placement.stages_of(rank):
        made: dict[str, tuple[Peer, ...]] = {}
        for op in schedule.ops & COMPUTE:
            event = result_of(op)  # B and BW send the same
            if event not in made:
                nearest_first = reversed(sends_after(schedule, event, stage))
                found = (_peer(schedule, rank, send, stage, microbatches) for send in nearest_first)
                made[event] = tuple(peer for peer in found if peer is not None)
            if made[event]:
                peers[op][stage] = made[event]
    return peers


def _peer(schedule: Schedule, rank: int, send: str, stage: int, microbatches: Sequence[int]) -> Peer | None:
    there = target(send, stage, schedule.stages)
    if there is None or (peer := schedule.placement.rank_beside(rank, stage, there)) == rank:
        return None
    sends = [Action(send, stage, m) for m in microbatches]
    receives = [Action(other_end(send), there, m) for m in microbatches]
    return Peer(peer, sends, receives)


def _interleave(order: Sequence[Step], peers: Peers, posts: Posts) -> tuple[Step, ...]:
    """Steps with the receives in front of them; sends follow their step, after the receives of the next."""
    program: list[Step] = []
    sends: list[Action] = []
    for step, receives in zip(order, posts[:-1], strict=True):
        if receives is not None:
            program += receives
        if sends:
            program += sends
            sends.clear()
        program.append(step)
        for op, stage, microbatch in step if isinstance(step, Pair) else (step,):
            sends += [peer.sends[microbatch] for peer in peers[op].get(stage, ())]
    return (*program, *(posts[-1] or ()), *sends)
