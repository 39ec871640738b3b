"""`check` accepts what is right; every kind of damage to a schedule or to a program is caught,
wherever it is done."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from zbcompile.schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    build,
    check,
    lower,
    simulate,
)
from zbcompile.schedules.ir.actions import COMMUNICATION, Pair, flatten

NAMES = ("1f1b", "zb-v", "dualpipe")
Orders = list[list[Any]]  # of steps; damage makes what no type admits


def require_refused(schedule: Schedule, orders: Orders) -> None:
    with pytest.raises(ScheduleError):
        check(replace(schedule, orders=tuple(map(tuple, orders))))


def place_of(orders: Orders, generator: random.Random, *ops: str) -> tuple[int, int]:
    places = [(r, i) for r, order in enumerate(orders) for i, s in enumerate(order) if s[0] in ops]
    return generator.choice(places)


def replacements(action: Action, schedule: Schedule, any_: random.Random) -> Iterator[list[Action]]:
    """Yields what is not that action: others in its place, none, and the action a second time."""
    op, stage, microbatch = action
    stages, microbatches = schedule.stages, schedule.microbatches
    for number in (-1, stages, (stage + any_.randint(1, stages - 1)) % stages):
        yield [Action(op, number, microbatch)]
    for number in (-1, microbatches, (microbatch + any_.randint(1, 7)) % microbatches):
        yield [Action(op, stage, number)]
    for other in {"F", "B", "W", "BW", "X", *COMMUNICATION} - {op}:
        yield [Action(other, stage, microbatch)]
    yield from ([], [action, action])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_messages", [False, True])
def test_damage_is_caught(name: str, with_messages: bool) -> None:
    """Steps that move inside of an order are compared with an executor, in `test_brute_force.py`."""
    schedule, generator = build(name, ranks=4, microbatches=8), random.Random(name)
    schedule = lower(schedule) if with_messages else schedule
    for _ in range(3):
        orders: Orders = [list(order) for order in schedule.orders]
        ops = COMMUNICATION if with_messages else ("F", "B", "W", "BW")
        rank, index = place_of(orders, generator, *ops)
        step = orders[rank][index]
        for damage in replacements(step, schedule, generator):
            order = [*orders[rank][:index], *damage, *orders[rank][index + 1 :]]
            require_refused(schedule, [*orders[:rank], order, *orders[rank + 1 :]])
        del orders[rank][index]
        orders[(rank + 1) % 4].insert(min(index, len(orders[(rank + 1) % 4])), step)
        require_refused(schedule, orders)
    a, b, *others = schedule.orders
    require_refused(schedule, [b, a, *others])


@pytest.mark.parametrize("name", NAMES)
def test_a_message_in_another_place_is_caught(name: str) -> None:
    schedule, generator = lower(build(name, ranks=4, microbatches=8)), random.Random(name)
    sends, receives = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
    for kind in ("swapped sends", "swapped receives", "late", "early", "lost") * 4:
        orders: Orders = [list(order) for order in schedule.orders]
        ops = receives if kind in ("swapped receives", "late") else sends
        rank, i = place_of(orders, generator, *(("SEND_F",) if kind == "lost" else ops))
        order = orders[rank]
        if kind.startswith("swapped"):  # another order on the channel
            like = [j for j, s in enumerate(order) if s[:2] == order[i][:2] and j != i]
            j = generator.choice(like)
            order[i], order[j] = order[j], order[i]
        elif kind == "late":  # behind its use
            order.append(order.pop(i))
        elif kind == "early":  # before its pass
            order.insert(0, order.pop(i))
        else:
            _, stage, microbatch = order.pop(i)
            for each in orders:
                each[:] = [s for s in each if s != Action("RECV_F", stage + 1, microbatch)]
        require_refused(schedule, orders)


def test_a_pair_is_a_forward_and_a_backward() -> None:
    schedule = build("1f1b-overlap", ranks=1, microbatches=3)
    turned = tuple(
        Pair(*step[::-1]) if isinstance(step, Pair) else step for step in schedule.orders[0]
    )
    with pytest.raises(ScheduleError, match="a pair is a forward F and a backward B or BW"):
        check(replace(schedule, orders=(turned,)))


def test_receives_right_before_their_use_deadlock_under_rendezvous() -> None:
    """The naive placement: in 1F1B two neighbours send to each other at the same time, and neither
    has posted."""
    lowered = lower(build("1f1b", ranks=2, microbatches=4))
    programs = []
    for rank, program in enumerate(lowered.orders):
        late: list[Any] = []
        for step in flatten(program):
            if (rank, step.op) in ((1, "F"), (0, "BW")):
                late.append(Action("RECV_F" if rank else "RECV_B", rank, step.microbatch))
            late += [] if step.op.startswith("RECV") else [step]
        programs.append(tuple(late))
    message = r"(?s)deadlock: these ranks wait for each other.*rank 0 stops at SEND_F0"
    with pytest.raises(ScheduleError, match=message):
        check(replace(lowered, orders=tuple(programs)))


@pytest.mark.parametrize("judge", [check, lower, simulate], ids=["check", "lower", "simulate"])
def test_what_is_no_schedule_is_refused_by_all(judge: Callable[..., object]) -> None:
    """Never an error of ours, always one that says what is wrong with theirs."""
    good = build("1f1b", ranks=2, microbatches=2)
    f, b = good.orders
    wrong = (("F", 1, None), ("X", 1, 0), ("F", 7, 0), ("F", 1, 99))
    bad = [(f,), (f, b, ()), (f, ("F1.0",)), (f, (3, *b)), (f, b[:-2]), (f, b[::-1])]
    for orders in (*bad, *((f, (Action(*action), *b)) for action in wrong)):
        with pytest.raises(ScheduleError):
            judge(replace(good, orders=orders))
    with pytest.raises(ScheduleError, match="costs of 3 stages for 2 stages"):
        judge(good, Costs.uniform(3))
    with pytest.raises(ScheduleError, match="received None; expected a Schedule"):
        check(None)


def test_an_error_shows_the_grid_around_the_culprit() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    first, second = schedule.orders
    with pytest.raises(ScheduleError) as caught:
        check(replace(schedule, orders=(first, (*second[:2], Action("F", 0, 1), second[3]))))
    assert (
        str(caught.value) == "1f1b: rank 1, step 2: F0.1 is on rank 1; its place is rank 0\n"
        "        0     1      2       3\n"
        "rank 0  F0.0  F0.1   BW0.0   BW0.1\n"
        "rank 1  F1.0  BW1.0  [F0.1]  BW1.1"
    )


def test_the_memory_limit_is_that_of_the_costs() -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    check(schedule, memory_limit=4)
    with pytest.raises(ScheduleError, match=r"rank 0, step 3: needs 4 of memory; the limit is 3"):
        check(schedule, memory_limit=3)
    with pytest.raises(ScheduleError, match="needs 8"):
        check(schedule, costs=Costs.uniform(4, activation=2), memory_limit=4)


def test_a_declared_order_of_weight_gradients_is_accepted() -> None:
    lazy = build("zb-h1-lazy", ranks=4, microbatches=8)
    check(lazy)
    with pytest.raises(ScheduleError, match="gradients of stage 1 run microbatch 4 before 0"):
        check(lazy, weight_order="microbatch")
    check(replace(build("zb-h1", 4, 8), name="mine"), weight_order="microbatch")
