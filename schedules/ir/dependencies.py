"""Dependencies: the one place that knows that F goes down the pipeline and B back up, and what W, S
and T wait for.

The tables of `zbcompile.schedules.ir.kinds` say everything else about operations.
"""

from functools import cache
from typing import NamedTuple

from zbcompile.schedules.ir.actions import BROADCAST, BW, EMBED, INPUT_GRAD, STATS, B, F, S, T
from zbcompile.schedules.ir.kinds import COLLECTIVE_OPS, COMPUTE_OPS, OPS, result_of
from zbcompile.schedules.ir.schedule import Schedule

# of results that another stage needs: to the next stage, or to the one before
DIRECTION = {F: 1, B: -1}


class Dependency(NamedTuple):
    """The result of an operation on a stage, for the same microbatch."""

    op: str
    stage: int


@cache
def needs(op: str, stage: int, stages: int) -> tuple[Dependency, ...]:
    """Returns the results that a compute action or a collective needs, without those of every
    vocabulary shard.

    >>> needs("F", 0, 4), needs("B", 3, 4), needs("B", 2, 4)
    ((), (Dependency(op='F', stage=3),), (Dependency(op='B', stage=3),))
    >>> needs("W", 1, 4), needs("S", 1, 4)
    ((Dependency(op='B', stage=1),), (Dependency(op='F', stage=3),))
    """
    if op in COLLECTIVE_OPS:
        payload = COLLECTIVE_OPS[op]
        return (Dependency(payload, {F: stages - 1, B: 0}.get(payload, stage)),) if payload else ()
    if op == S:
        return (Dependency(F, stages - 1),)
    result = result_of(op)
    if result in DIRECTION and 0 <= stage - DIRECTION[result] < stages:
        return (Dependency(result, stage - DIRECTION[result]),)
    return tuple(Dependency(neighbour, stage) for neighbour in COMPUTE_OPS[op].after)


def shard_dependencies(schedule: Schedule, lowered: bool) -> dict[tuple[str, int], str]:
    """Returns, by operation and stage, the operation that EVERY shard must have run before.

    In a lowered schedule this is a collective, which is complete when every shard has posted it.
    """
    if not schedule.shards:
        return {}
    reduced = {1: (S, STATS), 2: (T, INPUT_GRAD)}[schedule.barriers][lowered]
    needed = {(op, schedule.stages - 1): reduced for op in (B, BW)}
    needed |= {(T, shard): STATS if lowered else S for shard in schedule.shards}
    if lowered:
        needed |= {(S, shard): BROADCAST for shard in schedule.shards}
    return needed | {(F, 0): EMBED} if lowered and schedule.lookups else needed


class Route(NamedTuple):
    """The ranks between which the messages of one kind and stage are sent, and the stage at the
    other end."""

    source: int
    destination: int
    stage: int


def routes_of(schedule: Schedule, rank: int) -> dict[tuple[str, int], Route]:
    """Returns the routes of `rank` by operation ("SEND_F", ...) and stage.

    Results that stay on the rank have a route from it to itself.

    >>> from zbcompile.schedules import build
    >>> routes_of(build("1f1b", ranks=2, microbatches=1), 0)["SEND_F", 0]
    Route(source=0, destination=1, stage=1)
    """
    routes: dict[tuple[str, int], Route] = {}
    placement, results = schedule.placement, {result_of(op) for op in schedule.ops & OPS}
    for stage in placement.stages_of(rank):
        for op, step in DIRECTION.items():
            for direction, neighbour in (("RECV", stage - step), ("SEND", stage + step)):
                if op in results and 0 <= neighbour < schedule.stages:
                    peer = placement.rank_of_neighbour(rank, stage, neighbour)
                    ends = (rank, peer) if direction == "SEND" else (peer, rank)
                    routes[f"{direction}_{op}", stage] = Route(*ends, neighbour)
    return routes
