"""Where the messages of a schedule travel: between which ranks, and under which numbers."""

from typing import NamedTuple

from zbcompile.schedules.ir.actions import RECEIVES
from zbcompile.schedules.ir.dependencies import messages_of, other_end, receives_before, sends_after, source, target
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Schedule

Channel = tuple[int, int]  # source rank, destination rank
MessageNo = int  # ((receiving stage) * (kinds of receives) + kind) * microbatches + microbatch


class Route(NamedTuple):
    """Where messages of one kind and stage travel, and the message of microbatch 0."""

    channel: Channel
    first: MessageNo


Routes = dict[tuple[str, int], Route]


def channels_of(schedule: Schedule) -> tuple[Channel, ...]:
    """Every pair of ranks, source and destination, between which a schedule sends messages."""
    found = {route.channel for rank in range(schedule.ranks) for route in routes_of(schedule, rank).values()}
    return tuple(sorted(found))


def routes_of(schedule: Schedule, rank: int) -> Routes:
    """Every kind of message that `rank` sends or receives, by (op, stage)."""
    routes: Routes = {}
    made = {KINDS[op].event for op in schedule.ops}
    for stage in schedule.placement.stages_of(rank):
        for op in made:
            for send in sends_after(schedule, op, stage):
                there = target(send, stage, schedule.stages)
                if there is not None and (peer := schedule.placement.rank_beside(rank, stage, there)) != rank:
                    routes[send, stage] = Route((rank, peer), _first(schedule, other_end(send), there))
            for receive in receives_before(schedule, op, stage):
                here = source(receive, stage, schedule.stages)
                if here is not None and (peer := schedule.placement.rank_beside(rank, stage, here)) != rank:
                    routes[receive, stage] = Route((peer, rank), _first(schedule, receive, stage))
    return routes


def kinds_of_receives(schedule: Schedule) -> list[str]:
    return sorted(messages_of(schedule) & RECEIVES)


def _first(schedule: Schedule, receive: str, stage: int) -> MessageNo:
    """The message for microbatch 0 that `receive` brings to `stage`."""
    kinds = kinds_of_receives(schedule)
    return (len(kinds) * stage + kinds.index(receive)) * schedule.microbatches
