"""The rules of a lowered program: the right messages, in the right order, without a deadlock."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import cast

from zbcompile.schedules.actions import (
    BW,
    COMMUNICATION,
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
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.excerpt import culprit_error
from zbcompile.schedules.schedule import Lowered, Schedule

Channel = tuple[int, int]  # source rank, destination rank
Message = tuple[str, int, int]  # RECV_F or RECV_B, receiving stage, microbatch
Routes = dict[tuple[str, int], tuple[Channel, str, int]]  # (op, stage) -> channel, and the message less its microbatch


def check_communication(lowered: Lowered) -> tuple[int, ...]:
    """Raise `ScheduleError` unless the messages of a program are right; return the most receive buffers live, by rank.

    The orders of the schedule itself are taken to be right, except that they may wait for each other.
    """
    schedule = lowered.schedule
    if len(lowered.programs) != schedule.ranks:
        raise ScheduleError(f"{schedule.name}: {len(lowered.programs)} programs for {schedule.ranks} ranks")
    sent: dict[Channel, list[Message]] = defaultdict(list)
    received: dict[Channel, list[Message]] = defaultdict(list)
    routes = [_routes(schedule, rank) for rank in range(schedule.ranks)]
    for rank in range(schedule.ranks):
        _check_computation(lowered, rank)
        _collect_messages(lowered, rank, routes[rank], sent, received)
    for channel, expected in _expected(schedule, routes).items():
        _check_sends(lowered, channel, sent[channel], expected)
        _check_receives(lowered, channel, sent[channel], received[channel])
    outcome = run(lowered, Costs.uniform(schedule.stages))
    require_finished(lowered, outcome)
    for rank in range(schedule.ranks):
        _check_sends_follow(lowered, rank, routes[rank], outcome)
    return tuple(_receive_buffers(lowered, rank, routes[rank]) for rank in range(schedule.ranks))


def _routes(schedule: Schedule, rank: int) -> Routes:
    """Every kind of message that `rank` sends or receives."""
    routes: Routes = {}
    placement = schedule.placement
    for stage in placement.stages_of(rank):
        copy = int(placement.rank(stage) != rank)
        for step, outward, inward in ((1, SEND_F, RECV_B), (-1, SEND_B, RECV_F)):
            other = stage + step
            if 0 <= other < schedule.stages and placement.rank(other, copy) != rank:
                peer = placement.rank(other, copy)
                routes[outward, stage] = (rank, peer), RECV_F if outward == SEND_F else RECV_B, other
                routes[inward, stage] = (peer, rank), inward, stage
    return routes


def _check_computation(lowered: Lowered, rank: int) -> None:
    """Without its messages the program is the order."""
    order, program = lowered.schedule.orders[rank], lowered.programs[rank]
    computed = [(index, step) for index, step in enumerate(program) if step[0] not in COMMUNICATION]
    if len(computed) == len(order) and all(a[1] == b for a, b in zip(computed, order, strict=True)):
        return
    place = next((i for i, (a, b) in enumerate(zip(computed, order, strict=False)) if a[1] != b), None)
    if place is None:
        place = min(len(computed), len(order))
    found = str(computed[place][1]) if place < len(computed) else "nothing more"
    wanted = str(order[place]) if place < len(order) else "nothing more"
    index = computed[place][0] if place < len(computed) else len(program) - 1
    message = f"{lowered.schedule.name}: rank {rank}: the program computes {found} where the order has {wanted}"
    raise culprit_error(message, lowered.programs, rank, index)


def _collect_messages(
    lowered: Lowered,
    rank: int,
    routes: Routes,
    sent: Mapping[Channel, list[Message]],
    received: Mapping[Channel, list[Message]],
) -> None:
    """Append this rank's sends and receives to their channels."""
    for index, step in enumerate(lowered.programs[rank]):
        if step[0] not in COMMUNICATION:
            continue
        op, stage, microbatch = cast(Action, step)
        route = routes.get((op, stage))
        if route is None:
            message = (
                f"{lowered.schedule.name}: rank {rank}: {step} is not a message of this rank: it has no such stage"
            )
            raise culprit_error(f"{message}, or the other side is on the same rank", lowered.programs, rank, index)
        channel, receive, target = route
        (sent if channel[0] == rank else received)[channel].append((receive, target, microbatch))


def _expected(schedule: Schedule, routes: Sequence[Routes]) -> dict[Channel, list[Message]]:
    """The messages of every channel in any order."""
    expected: dict[Channel, list[Message]] = defaultdict(list)
    every = range(schedule.microbatches)
    for rank in range(schedule.ranks):
        for (op, stage), (channel, receive, target) in routes[rank].items():
            if op in (SEND_F, SEND_B):
                own = (
                    every
                    if schedule.placement.kind != "dual"
                    else [m for m in every if schedule.rank_of(stage, m) == rank]
                )
                expected[channel] += [(receive, target, m) for m in own]
    return expected


def _check_sends(lowered: Lowered, channel: Channel, sent: Sequence[Message], expected: Sequence[Message]) -> None:
    """Every message once."""
    if len(sent) == len(expected) and set(sent) == set(expected):
        return
    source, destination = channel
    name = f"{lowered.schedule.name}: channel {source} -> {destination}"
    missing = sorted(set(expected) - set(sent))
    if missing:
        raise ScheduleError(f"{name}: {_send_of(missing[0])} is missing in the program of rank {source}")
    seen: set[Message] = set()
    for message in sent:
        if message in seen or message not in expected:
            send = _send_of(message)
            index = _last_index(lowered.programs[source], send)
            text = f"{name}: {send} comes twice or belongs to no microbatch of this channel"
            raise culprit_error(text, lowered.programs, source, index)
        seen.add(message)


def _check_receives(lowered: Lowered, channel: Channel, sent: Sequence[Message], received: Sequence[Message]) -> None:
    """Posted in the order of the sends: a channel is one ordered stream, so a message that overtakes lands wrongly."""
    if sent == received:
        return
    source, destination = channel
    name = f"{lowered.schedule.name}: channel {source} -> {destination}"
    place = next((i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), None)
    if place is None and len(received) < len(sent):
        missing = Action(*sent[len(received)])
        raise ScheduleError(f"{name}: {missing} is missing in the program of rank {destination}")
    place = len(sent) if place is None else place
    posted = Action(*received[place])
    due = _send_of(sent[place]) if place < len(sent) else "nothing more"
    text = f"{name}: message {place} is {due}, but rank {destination} posts {posted} for it"
    raise culprit_error(text, lowered.programs, destination, _last_index(lowered.programs[destination], posted))


def _check_sends_follow(lowered: Lowered, rank: int, routes: Routes, outcome: Run) -> None:
    """No send before the pass that makes what it sends. Passes took positive time, so the times of the run show it."""
    events, happened, count = outcome.events, outcome.happened, lowered.schedule.microbatches
    for op, stage in routes:
        if op not in (SEND_F, SEND_B):
            continue
        made, sent = events.first(F if op == SEND_F else B, stage), events.first(op, stage)
        pairs = zip(happened[made : made + count], happened[sent : sent + count], strict=True)
        early = [m for m, (a, b) in enumerate(pairs) if b is not None and b < a]
        if early and lowered.schedule.placement.kind == "dual":
            early = [m for m in early if lowered.schedule.rank_of(stage, m) == rank]
        if early:
            send = Action(op, stage, early[0])
            text = f"{lowered.schedule.name}: rank {rank}: {send} stands before the pass that makes what it sends"
            raise culprit_error(text, lowered.programs, rank, _last_index(lowered.programs[rank], send))


def _receive_buffers(lowered: Lowered, rank: int, routes: Routes) -> int:
    """The most receives that are posted and whose consumer has not run yet."""
    change: dict[tuple[str, int], int] = {}
    for op, stage in routes:
        if op in (RECV_F, RECV_B):
            change[op, stage] = 1
            change |= {(consumer, stage): -1 for consumer in ((F,) if op == RECV_F else (B, BW))}
    program = lowered.programs[rank]
    actions = cast(Sequence[Action], flatten(program) if has_pairs(program) else program)
    return max(accumulate(change.get((op, stage), 0) for op, stage, _ in actions), default=0)


def _send_of(message: Message) -> Action:
    """The send that the receive of `message` waits for."""
    receive, target, microbatch = message
    return Action(SEND_F, target - 1, microbatch) if receive == RECV_F else Action(SEND_B, target + 1, microbatch)


def _last_index(program: Sequence[Step], action: Action) -> int:
    return max(index for index, step in enumerate(program) if step == action)
