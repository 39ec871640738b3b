"""From orders of passes to orders with messages: where every SEND, RECV and collective goes.

It is safe even when every send blocks until its receive is posted (rendezvous).

Run the orders once with messages that are buffered without limit: every compute action X gets a
start and an end. Then

* SEND(X) stands behind X and the receives that come next;
* RECV(X) stands on the receiving rank before the action that runs when X begins: early enough that
  the sender finds it posted and the transfer hides behind computation, late enough that at most one
  producer's duration of receives is open beyond what is in flight anyway.

Why this cannot deadlock: number RECV(X) with X's start, SEND(X) with X's end, compute with its own
start. Whatever can wait in front of RECV(X) on its rank began before X did, a consumer begins no
earlier than X ends, and times are positive: so every wait (send for receive, compute for send, next
for previous on a rank) is for a smaller number. As the producers on one rank begin in the order in
which they send, each channel's receives are posted in that order.
"""

from dataclasses import replace

from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.order_graph import gc_disabled, require_steps
from zbcompile.schedules.ir.actions import SENDS, Action, Pair, Step
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import routes_of
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, result_of
from zbcompile.schedules.ir.schedule import Schedule, require_schedule
from zbcompile.schedules.lowering.collectives import Posts, post, post_collectives

# By operation and stage of a rank: the rank that gets the results, and the ready-made actions by
# microbatch.
Peers = dict[tuple[str, int], tuple[int, list[Action], list[Action]]]


@gc_disabled()
def lower(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns the schedule with SEND, RECV and (with vocabulary passes) collective actions in every
    rank's order.

    `costs` (default: uniform) only say when each receive will be needed; whatever they are, the
    result is safe. Messages that the orders have already are placed again.

    Raises `ScheduleError` if the orders wait for each other in a circle, which no placement of
    messages can resolve.

    >>> from zbcompile.schedules import build
    >>> " ".join(map(str, lower(build("1f1b", ranks=2, microbatches=1)).orders[0]))
    'F0.0 RECV_B0.0 SEND_F0.0 BW0.0'
    """
    require_schedule(schedule)
    require_steps(schedule)
    schedule = schedule.compute_only()
    graph, run = run_to_end(schedule, costs or Costs.uniform(schedule.stages), positive=True)
    microbatches = tuple(range(schedule.microbatches))  # one object per number, not one per action
    peers = [_peers_of(schedule, rank, microbatches) for rank in range(schedule.ranks)]
    posts: list[Posts] = [[None] * (len(order) + 1) for order in schedule.orders]
    for rank, order in enumerate(schedule.orders):
        reached: dict[int, int] = {}  # the last node of each peer that a receive was put before
        for node, step in enumerate(order, graph.first[rank]):
            for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
                if (op, stage) in peers[rank]:
                    peer, _, receives = peers[rank][op, stage]
                    where = posts[peer], graph, run, peer, run.start[node]
                    reached[peer] = post(*where, receives[microbatch], reached.get(peer))
    if schedule.shards:
        post_collectives(graph, run, posts)
    return replace(schedule, orders=tuple(map(_interleave, schedule.orders, peers, posts)))


def _peers_of(schedule: Schedule, rank: int, microbatches: tuple[int, ...]) -> Peers:
    peers: Peers = {}
    for (send, stage), (_, peer, target) in routes_of(schedule, rank).items():
        if send in SENDS and peer != rank:
            payload = MESSAGE_OPS[send]
            sends = [Action(send, stage, m) for m in microbatches]
            receives = [Action(f"RECV_{payload}", target, m) for m in microbatches]
            # B and BW send the same
            for op in COMPUTE_OPS:
                if result_of(op) == payload:
                    peers[op, stage] = peer, sends, receives
    return peers


def _interleave(order: tuple[Step, ...], peers: Peers, posts: Posts) -> tuple[Step, ...]:
    """Returns the steps with the posts in front of them; sends follow their step, after the posts
    of the next."""
    program: list[Step] = []
    sends: list[Action] = []
    for step, posted in zip(order, posts, strict=False):
        program += posted or ()
        program += sends
        sends.clear()
        program.append(step)
        for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
            if (op, stage) in peers:
                sends.append(peers[op, stage][1][microbatch])
    return (*program, *(posts[-1] or ()), *sends)
