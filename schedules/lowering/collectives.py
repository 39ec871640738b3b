"""The collectives of the vocabulary passes: their one global order, and where they are posted.

All shards post the same collectives in the same order on a separate process group; posting never
waits, so a collective is complete when the last shard has posted it. In a run of the orders
collective X belongs to the time at which the last pass that feeds it ends. All shards post it
before the action that they run at that time. Then no post comes after what needs it: a consumer
begins no earlier than that time, and everything in front of a post began before it. Numbered by
these times they join the proof in `zbcompile.schedules.lowering.lower`.

An EMBED depends only on the inputs. It belongs to the time at which the forward of the first stage
two before its own ends, so that it has a forward's time to travel and at most two wait to be used.
"""

from bisect import bisect_left
from collections.abc import Sequence

from zbcompile.schedules.execution.order_graph import NodeTimes, OrderGraph
from zbcompile.schedules.ir.actions import (
    BROADCAST,
    EMBED,
    EMBED_GRAD,
    INPUT_GRAD,
    STATS,
    Action,
    F,
    T,
    flatten,
)
from zbcompile.schedules.ir.dependencies import needs
from zbcompile.schedules.ir.schedule import Schedule

LOOKUPS_AHEAD = 2
Posts = list[list[Action] | None]  # the posts before each step of one rank, and after the last


def collectives_of(schedule: Schedule) -> tuple[str, ...]:
    """Returns the kinds of collective that every microbatch needs, in the order in which it needs
    them."""
    passes = (BROADCAST, STATS, INPUT_GRAD)[: 1 + schedule.barriers]
    if not schedule.lookups:
        return passes
    return (EMBED, *passes, EMBED_GRAD) if T in schedule.ops else (EMBED, *passes)


def post_collectives(graph: OrderGraph, run: NodeTimes, posts: Sequence[Posts]) -> None:
    """Enters every collective into the `posts` of every shard's rank, behind the receives already
    in them."""
    # with the times at which they can begin
    schedule, collectives = (graph.schedule, list[tuple[float, int, str]]())
    for op in collectives_of(schedule):
        inputs = {need for shard in schedule.shards for need in needs(op, shard, schedule.stages)}
        for m in range(schedule.microbatches) if inputs else ():
            collectives.append((max(run.end[graph.node(*need, m)] for need in inputs), m, op))
    if schedule.lookups:
        forwards = [
            a.microbatch
            for a in flatten(schedule.orders[schedule.rank_of(0, 0)])
            if a[:2] == (F, 0)
        ]
        times = [0.0] * LOOKUPS_AHEAD + [run.end[graph.node(F, 0, m)] for m in forwards]
        collectives += [(time, m, EMBED) for time, m in zip(times, forwards, strict=False)]
    for time, microbatch, op in sorted(collectives):
        for shard in schedule.shards:
            rank = schedule.rank_of(shard, 0)
            post(posts[rank], graph, run, rank, time, Action(op, shard, microbatch))


def post(
    posts: Posts,
    graph: OrderGraph,
    run: NodeTimes,
    rank: int,
    time: float,
    action: Action,
    reached: int | None = None,
) -> int:
    """Enters `action` before the step that `rank` runs at `time`, or the next one; returns the node
    of that step.

    `reached`: a node of the rank that is known not to be behind it.
    """
    first = graph.first[rank]
    node = bisect_left(
        run.start, time, first if reached is None else reached, graph.first[rank + 1]
    )
    if node > first and run.end[node - 1] > time:
        node -= 1
    present = posts[node - first]
    if present is None:
        posts[node - first] = [action]
    else:
        present.append(action)
    return node
