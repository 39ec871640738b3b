"""The rules of a lowered program: the right messages, in the right order, without a deadlock."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end, schedule_error_at
from zbcompile.schedules.ir.actions import COMMUNICATION, COMPUTE, MESSAGES, RECEIVES, SENDS, Action, Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import (
    other_end,
    source,
)
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Lowered, Schedule
from zbcompile.schedules.lowering.collectives import check_collectives
from zbcompile.schedules.lowering.routes import Channel, MessageNo, Routes, kinds_of_receives, routes_of
from zbcompile.schedules.lowering.updates import check_exchanges


def check_communication(lowered: Lowered) -> tuple[int, ...]:
    """Raise `ScheduleError` unless the messages of a program are right; return the most receive buffers live, by rank.

    The orders of the schedule itself are assumed to be right, except that they may deadlock.
    """
    schedule = lowered.schedule
    if len(lowered.programs) != schedule.ranks:
        raise ScheduleError(f"{schedule.name}: {len(lowered.programs)} programs for {schedule.ranks} ranks")
    sent: dict[Channel, list[MessageNo]] = defaultdict(list)
    received: dict[Channel, list[MessageNo]] = defaultdict(list)
    routes = [routes_of(schedule, rank) for rank in range(schedule.ranks)]
    for rank in range(schedule.ranks):
        _check_computation(lowered, rank)
        _collect_messages(lowered, rank, routes[rank], sent, received)
    for channel, expected in _expected(schedule, routes).items():
        _check_sends(lowered, channel, sent[channel], expected)
        _check_receives(lowered, channel, sent[channel], received[channel])
    check_collectives(lowered)
    check_exchanges(lowered)
    run_to_end(lowered, Costs.uniform(schedule.stages))
    return tuple(_receive_buffers(lowered, rank, routes[rank]) for rank in range(schedule.ranks))


def _check_computation(lowered: Lowered, rank: int) -> None:
    """Require that the program without its messages equals the order."""
    order, program = lowered.schedule.orders[rank], lowered.programs[rank]
    computed = [step for step in program if step[0] not in COMMUNICATION]
    if computed == list(order):
        return
    places = [index for index, step in enumerate(program) if step[0] not in COMMUNICATION]
    common = min(len(computed), len(order))
    place = next((i for i in range(common) if computed[i] != order[i]), common)
    found = str(computed[place]) if place < len(computed) else "nothing more"
    wanted = str(order[place]) if place < len(order) else "nothing more"
    message = f"{lowered.schedule.name}: rank {rank}: the program computes {found} where the order has {wanted}"
    raise schedule_error_at(message, lowered.programs, rank, places[place] if place < len(places) else len(program) - 1)


def _collect_messages(
    lowered: Lowered,
    rank: int,
    routes: Routes,
    sent: Mapping[Channel, list[MessageNo]],
    received: Mapping[Channel, list[MessageNo]],
) -> None:
    """Append this rank's sends and receives to their channels."""
    count = lowered.schedule.microbatches
    lanes = {
        key: ((sent if route.channel[0] == rank else received)[route.channel], route.first)
        for key, route in routes.items()
    }
    for index, step in enumerate(lowered.programs[rank]):
        if step[0] not in MESSAGES:
            continue
        op, stage, microbatch = cast(Action, step)
        if (op, stage) not in lanes or not 0 <= microbatch < count:
            reason = "no such stage or microbatch here, or the other side is on the same rank"
            message = f"{lowered.schedule.name}: rank {rank}: {step} is not a message of this rank: {reason}"
            raise schedule_error_at(message, lowered.programs, rank, index)
        lane, first = lanes[op, stage]
        lane.append(first + microbatch)


def _expected(schedule: Schedule, routes: Sequence[Routes]) -> dict[Channel, list[MessageNo]]:
    """The messages that every channel must carry, in any order."""
    expected: dict[Channel, list[MessageNo]] = defaultdict(list)
    for rank in range(schedule.ranks):
        for (op, stage), route in routes[rank].items():
            if op in SENDS:
                expected[route.channel] += [route.first + m for m in schedule.microbatches_of(stage, rank)]
    return expected


def _check_sends(lowered: Lowered, channel: Channel, sent: Sequence[MessageNo], expected: Sequence[MessageNo]) -> None:
    """Require that every message is sent once."""
    if len(sent) == len(expected) and set(sent) == set(expected):
        return
    source, destination = channel
    name = f"{lowered.schedule.name}: channel {source} -> {destination}"
    missing = sorted(set(expected) - set(sent))
    if missing:
        raise ScheduleError(f"{name}: {_send_of(lowered, missing[0])} is missing in the program of rank {source}")
    seen: set[MessageNo] = set()
    for message in sent:
        if message in seen or message not in expected:
            send = _send_of(lowered, message)
            index = _last_index(lowered.programs[source], send)
            text = f"{name}: {send} appears twice or belongs to no microbatch of this channel"
            raise schedule_error_at(text, lowered.programs, source, index)
        seen.add(message)


def _check_receives(
    lowered: Lowered, channel: Channel, sent: Sequence[MessageNo], received: Sequence[MessageNo]
) -> None:
    """Require receives in the order of the sends: a message that overtakes another ends up in the wrong buffer."""
    if sent == received:
        return
    source, destination = channel
    name = f"{lowered.schedule.name}: channel {source} -> {destination}"
    place = next((i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), None)
    if place is None and len(received) < len(sent):
        missing = _receive_of(lowered, sent[len(received)])
        raise ScheduleError(f"{name}: {missing} is missing in the program of rank {destination}")
    place = len(sent) if place is None else place
    posted = _receive_of(lowered, received[place])
    due = _send_of(lowered, sent[place]) if place < len(sent) else "nothing more"
    text = f"{name}: message {place} is {due}, but rank {destination} posts {posted} for it"
    raise schedule_error_at(text, lowered.programs, destination, _last_index(lowered.programs[destination], posted))


def _receive_buffers(lowered: Lowered, rank: int, routes: Routes) -> int:
    """The most receives that are posted and whose consumer has not run yet."""
    change: dict[tuple[str, int], int] = {}
    for op, stage in routes:
        if op in RECEIVES:
            change[op, stage] = 1
            users = (user for user in COMPUTE if KINDS[user].event == KINDS[op].takes)
            change |= {(user, stage): change.get((user, stage), 0) - 1 for user in users}
    actions = flatten(lowered.programs[rank])
    return max(accumulate(change.get((op, stage), 0) for op, stage, _ in actions), default=0)


def _receive_of(lowered: Lowered, message: MessageNo) -> Action:
    kind, microbatch = divmod(message, lowered.schedule.microbatches)
    kinds = kinds_of_receives(lowered.schedule)
    stage, index = divmod(kind, len(kinds))
    return Action(kinds[index], stage, microbatch)


def _send_of(lowered: Lowered, message: MessageNo) -> Action:
    """The send that the receive of `message` waits for."""
    receive, stage, microbatch = _receive_of(lowered, message)
    sender = source(receive, stage, lowered.schedule.stages)
    assert sender is not None
    return Action(other_end(receive), sender, microbatch)


def _last_index(program: Sequence[Step], action: Action) -> int:
    return max(index for index, step in enumerate(program) if step == action)
