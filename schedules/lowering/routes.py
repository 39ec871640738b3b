"""The channels of a schedule: between which ranks its messages travel."""

from typing import NamedTuple

from zbcompile.schedules.ir.dependencies import other_end, receives_before, sends_after, source, target
from zbcompile.schedules.ir.kinds import result_of
from zbcompile.schedules.ir.schedule import Schedule

Channel = tuple[int, int]  # source rank, destination rank


class Route(NamedTuple):
    """Where messages of one kind and stage travel: the receive that they end in, and its stage."""

    channel: Channel
    receive: str
    stage: int


def channels_of(schedule: Schedule) -> tuple[Channel, ...]:
    """Returns every pair of ranks, source and destination, between which a schedule sends messages."""
    found = {route.channel for rank in range(schedule.ranks) for route in routes_of(schedule, rank).values()}
    return tuple(sorted(found))


def routes_of(schedule: Schedule, rank: int) -> dict[tuple[str, int], Route]:
    """Returns the route of every kind of message that `rank` sends or receives, by operation and stage."""
    routes: dict[tuple[str, int], Route] = {}
    for stage in schedule.placement.stages_of(rank):
        for op in {result_of(op) for op in schedule.ops}:
            for send in sends_after(schedule, op, stage):
                there = target(send, stage, schedule.stages)
                if there is not None and (peer := schedule.placement.rank_beside(rank, stage, there)) != rank:
                    routes[send, stage] = Route((rank, peer), other_end(send), there)
            for receive in receives_before(schedule, op, stage):
                here = source(receive, stage, schedule.stages)
                if here is not None and (peer := schedule.placement.rank_beside(rank, stage, here)) != rank:
                    routes[receive, stage] = Route((peer, rank), receive, stage)
    return routes
