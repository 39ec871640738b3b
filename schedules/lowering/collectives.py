"""The collectives of the vocabulary passes: their one global order, where they are posted, and the rules that `check`
applies.

All shards post the same collectives in the same order on a separate process group; posting never waits, so a
collective is complete when the last shard has posted it. In a run of the orders collective X belongs to the time at
which the last pass that feeds it ends. All shards post it before the action that they run at that time. Then no post
comes after what waits for it: a consumer begins no earlier than that time, and everything in front of a post began
before it. Numbered by these times they join the proof in `zbcompile.schedules.lowering.lower`.

A LOOKUP depends only on the inputs. It belongs to the time at which the forward of the first stage two before its own
ends, so that it has a forward's time to travel and at most two wait to be used.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import schedule_error_at
from zbcompile.schedules.execution.order_graph import NodeTimes, OrderGraph
from zbcompile.schedules.ir.actions import CAST, COLLECTIVES, LOOKUP, SPREAD, STATS, SUM, Action, F, Step, T, flatten
from zbcompile.schedules.ir.dependencies import needs
from zbcompile.schedules.ir.schedule import Schedule

LOOKUPS_AHEAD = 2
Collective = tuple[float, int, str]  # when it can begin, its microbatch, its operation
Posts = list[list[Action] | None]  # the posts before each step of one rank, and after the last


def collectives_of(schedule: Schedule) -> tuple[str, ...]:
    """The kinds of collective that every microbatch needs, in the order in which it needs them."""
    passes = (CAST, STATS, SUM)[: 1 + schedule.barriers]
    if not schedule.lookups:
        return passes
    return (LOOKUP, *passes, SPREAD) if T in schedule.ops else (LOOKUP, *passes)


def global_order(graph: OrderGraph, run: NodeTimes) -> list[Collective]:
    """Returns every collective of a step in the order of the times at which they can begin."""
    schedule, found = graph.schedule, list[Collective]()
    for op in collectives_of(schedule):
        inputs = {need for shard in schedule.shards for need in needs(op, shard, schedule.stages)}
        for m in range(schedule.microbatches) if inputs else ():
            found.append((max(run.end[graph.node(*need, m)] for need in inputs), m, op))
    return sorted([*found, *(_lookups(graph, run) if schedule.lookups else ())])


def _lookups(graph: OrderGraph, run: NodeTimes) -> list[Collective]:
    """Returns every LOOKUP, with the time of the forward two before its own."""
    schedule = graph.schedule
    first = [a.microbatch for a in flatten(schedule.orders[schedule.rank_of(0, 0)]) if a.op == F and a.stage == 0]
    times = [0.0] * LOOKUPS_AHEAD + [run.end[graph.node(F, 0, m)] for m in first]
    return [(time, m, LOOKUP) for time, m in zip(times, first, strict=False)]


def post_collectives(graph: OrderGraph, run: NodeTimes, posts: Sequence[Posts]) -> None:
    """Enters every collective into the `posts` of every shard's rank, behind the receives already in them."""
    schedule, first = graph.schedule, graph.first
    shard_of = {schedule.rank_of(shard, 0): shard for shard in schedule.shards}
    for time, microbatch, op in global_order(graph, run):
        for rank, shard in shard_of.items():
            place = bisect_left(run.start, time, first[rank], first[rank + 1])
            if place > first[rank] and run.end[place - 1] > time:
                place -= 1
            place -= first[rank]
            found = posts[rank][place] = posts[rank][place] or []
            found.append(Action(op, shard, microbatch))


def check_collectives(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every shard posts every collective once, all of them in the same order."""
    shards = {schedule.rank_of(shard, 0): shard for shard in schedule.shards}
    posted = {rank: _posted(program) for rank, program in enumerate(schedule.orders)}
    for rank, found in posted.items():
        kinds = collectives_of(schedule) if rank in shards else ()
        expected = {(op, m) for op in kinds for m in range(schedule.microbatches)}
        for (op, microbatch), index in found:
            if (op, microbatch) not in expected or schedule.orders[rank][index][1] != shards[rank]:
                _refuse(schedule, rank, index, "appears twice, or belongs to no shard of this rank")
            expected.discard((op, microbatch))
        if expected:
            op, microbatch = min(expected, key=lambda each: each[::-1])
            raise ScheduleError(f"{schedule.name}: rank {rank} never posts {Action(op, shards[rank], microbatch)}")
    first = next(iter(shards), 0)
    for rank in shards:
        for (one, _), (other, index) in zip_longest(posted[first], posted[rank]):
            if one != other:
                _refuse(schedule, rank, index, f"is posted where rank {first} posts {one[0]} of microbatch {one[1]}")


def _posted(program: Sequence[Step]) -> list[tuple[tuple[str, int], int]]:
    """The collectives of one rank, each with the index of its step."""
    found = ((step, index) for index, step in enumerate(program) if step[0] in COLLECTIVES)
    return [((str(step[0]), step[2]), index) for step, index in found if isinstance(step, Action)]


def _refuse(schedule: Schedule, rank: int, index: int, reason: str) -> None:
    what = f"{schedule.name}: rank {rank}: {schedule.orders[rank][index]} {reason}"
    rule = "all shards post the same collectives in the same order"
    raise schedule_error_at(f"{what}; {rule}", schedule.orders, rank, index)
