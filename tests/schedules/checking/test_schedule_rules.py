"""`check` accepts what is right; every kind of damage to a schedule or to a program is caught,
wherever it is done."""

import random
from collections.abc import Callable
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

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zb-v",
    "1f1b-overlap",
    "dualpipe",
)
Orders = list[list[Any]]  # of steps; damage makes what no type admits


def actions(orders: Orders) -> list[tuple[int, int]]:
    """Where the actions that are no pairs stand."""
    return [
        (r, i)
        for r, order in enumerate(orders)
        for i, step in enumerate(order)
        if not isinstance(step, Pair)
    ]


def pick(orders: Orders, generator: random.Random, ops: tuple[str, ...]) -> tuple[int, int]:
    return generator.choice([(r, i) for r, i in actions(orders) if orders[r][i][0] in ops])


COMPUTE_OPS = ("F", "B", "W", "BW")


def drop(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    del orders[r][i]


def duplicate(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    orders[r].insert(generator.randint(i, len(orders[r])), orders[r][i])


def other_rank(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    there = (r + generator.randint(1, len(orders) - 1)) % len(orders)
    orders[there].insert(min(i, len(orders[there])), orders[r].pop(i))


def other_stage(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    op, stage, microbatch = orders[r][i]
    orders[r][i] = Action(
        op, (stage + generator.randint(1, schedule.stages - 1)) % schedule.stages, microbatch
    )


def no_such_stage(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    orders[r][i] = orders[r][i]._replace(stage=generator.choice((-1, schedule.stages)))


def other_microbatch(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    op, stage, microbatch = orders[r][i]
    orders[r][i] = Action(
        op,
        stage,
        (microbatch + generator.randint(1, schedule.microbatches - 1)) % schedule.microbatches,
    )


def no_such_microbatch(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    orders[r][i] = orders[r][i]._replace(microbatch=generator.choice((-1, schedule.microbatches)))


def other_operation(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    op = generator.choice([op for op in COMPUTE_OPS if op != orders[r][i][0]])
    orders[r][i] = orders[r][i]._replace(op=op)


def message_among_computation(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, COMPUTE_OPS)
    orders[r].insert(i, orders[r][i]._replace(op=generator.choice(sorted(COMMUNICATION))))


def backward_before_forward(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, ("F",))
    _, stage, microbatch = orders[r][i]
    later = [
        j for j, s in enumerate(orders[r]) if s[0] in ("B", "BW") and s[1:] == (stage, microbatch)
    ]
    if not later:  # the backward is in a pair: move the forward behind everything
        orders[r].append(orders[r].pop(i))
        return
    orders[r].insert(i, orders[r].pop(later[0]))


def swapped_ranks(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    a, b = generator.sample(range(len(orders)), 2)
    orders[a], orders[b] = orders[b], orders[a]


def swapped_weight_gradients(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    """Two W (or BW) of one stage change their places."""
    r, i = pick(orders, generator, ("W", "BW"))
    same = [
        j
        for j, s in enumerate(orders[r])
        if s[0] in ("W", "BW") and s[1] == orders[r][i][1] and j != i
    ]
    if not same:  # the others are in pairs: before their backward is too early as well
        orders[r].insert(0, orders[r].pop(i))
        return
    j = generator.choice(same)
    orders[r][i], orders[r][j] = orders[r][j], orders[r][i]


def swapped_last_forwards(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    last = schedule.stages - 1
    r = generator.choice([r for r in range(len(orders)) if last in schedule.placement.stages_of(r)])
    forwards = [i for i, s in enumerate(orders[r]) if s[0] == "F" and s[1] == last]
    if len(forwards) < 2:  # most of them are in pairs: reversing the order is at least as wrong
        orders[r].reverse()
        return
    i, j = generator.sample(forwards, 2)
    orders[r][i], orders[r][j] = orders[r][j], orders[r][i]


def reversed_order(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    generator.choice(orders).reverse()


def missing_rank(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    del orders[generator.randrange(len(orders))]


SCHEDULE_DAMAGE = (
    drop,
    duplicate,
    other_rank,
    other_stage,
    no_such_stage,
    other_microbatch,
    no_such_microbatch,
    other_operation,
    message_among_computation,
    backward_before_forward,
    swapped_ranks,
    swapped_weight_gradients,
    swapped_last_forwards,
    reversed_order,
    missing_rank,
)
Damage = Callable[[Orders, Schedule, random.Random], None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", SCHEDULE_DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_schedule_is_caught(name: str, damage: Damage) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    generator = random.Random(f"{name} {damage.__name__}")
    for _ in range(20):
        orders = [list(order) for order in schedule.orders]
        damage(orders, schedule, generator)
        damaged = replace(schedule, orders=tuple(map(tuple, orders)))
        with pytest.raises(ScheduleError):
            check(damaged)


def on_a_channel(
    orders: Orders, schedule: Schedule, generator: random.Random, ops: tuple[str, ...]
) -> tuple[int, int, int]:
    """Two messages of one kind and stage on one rank."""
    r, i = pick(orders, generator, ops)
    same = [j for j, s in enumerate(orders[r]) if s[:2] == orders[r][i][:2] and j != i]
    return r, i, generator.choice(same)


def drop_message(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, tuple(COMMUNICATION))
    del orders[r][i]


def duplicate_message(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, tuple(COMMUNICATION))
    orders[r].insert(generator.randint(0, len(orders[r])), orders[r][i])


def drop_send_and_receive(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, ("SEND_F",))
    _, stage, microbatch = orders[r].pop(i)
    for order in orders:
        order[:] = [step for step in order if step != Action("RECV_F", stage + 1, microbatch)]


def swap_receives(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i, j = on_a_channel(orders, schedule, generator, ("RECV_F", "RECV_B"))
    orders[r][i], orders[r][j] = orders[r][j], orders[r][i]


def swap_sends(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i, j = on_a_channel(orders, schedule, generator, ("SEND_F", "SEND_B"))
    orders[r][i], orders[r][j] = orders[r][j], orders[r][i]


def message_to_other_stage(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, tuple(COMMUNICATION))
    stage = (orders[r][i].stage + generator.randint(1, schedule.stages - 1)) % schedule.stages
    orders[r][i] = orders[r][i]._replace(stage=stage)


def message_of_other_microbatch(
    orders: Orders, schedule: Schedule, generator: random.Random
) -> None:
    r, i = pick(orders, generator, tuple(COMMUNICATION))
    microbatch = (orders[r][i].microbatch + generator.randint(1, schedule.microbatches)) % (
        schedule.microbatches + 1
    )
    orders[r][i] = orders[r][i]._replace(microbatch=microbatch)


def message_on_other_rank(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, tuple(COMMUNICATION))
    there = (r + generator.randint(1, len(orders) - 1)) % len(orders)
    orders[there].insert(min(i, len(orders[there])), orders[r].pop(i))


def send_before_its_pass(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, ("SEND_F", "SEND_B"))
    send = orders[r].pop(i)
    ops = ("F",) if send.op == "SEND_F" else ("B", "BW")
    made = next(
        j
        for j, s in enumerate(orders[r])
        for a in (s if isinstance(s, Pair) else (s,))
        if a.op in ops and a[1:] == send[1:]
    )
    orders[r].insert(generator.randint(max(0, made - 1), made), send)


def receive_after_its_use(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r, i = pick(orders, generator, ("RECV_F", "RECV_B"))
    orders[r].append(orders[r].pop(i))


def drop_computation(orders: Orders, schedule: Schedule, generator: random.Random) -> None:
    r = generator.randrange(len(orders))
    del orders[r][
        generator.choice(
            [i for i, s in enumerate(orders[r]) if isinstance(s, Pair) or s[0] not in COMMUNICATION]
        )
    ]


PROGRAM_DAMAGE = (
    drop_message,
    duplicate_message,
    drop_send_and_receive,
    swap_receives,
    swap_sends,
    message_to_other_stage,
    message_of_other_microbatch,
    message_on_other_rank,
    send_before_its_pass,
    receive_after_its_use,
    drop_computation,
    missing_rank,
    reversed_order,
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", PROGRAM_DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_program_is_caught(name: str, damage: Damage) -> None:
    lowered = lower(build(name, ranks=4, microbatches=8))
    generator = random.Random(f"{name} {damage.__name__}")
    for _ in range(20):
        programs = [list(program) for program in lowered.orders]
        damage(programs, lowered.compute_only(), generator)
        with pytest.raises(ScheduleError):
            check(replace(lowered, orders=tuple(map(tuple, programs))))


def test_a_pair_is_a_forward_and_a_backward() -> None:
    schedule = build("1f1b-overlap", ranks=1, microbatches=3)
    turned = tuple(
        Pair(step.second, step.first) if isinstance(step, Pair) else step
        for step in schedule.orders[0]
    )
    assert turned != schedule.orders[0]
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
            if step.op in ("RECV_F", "RECV_B"):
                continue
            if (rank, step.op) in ((1, "F"), (0, "BW")):
                late.append(Action("RECV_F" if rank else "RECV_B", rank, step.microbatch))
            late.append(step)
        programs.append(tuple(late))
    with pytest.raises(
        ScheduleError,
        match=r"(?s)deadlock: these ranks wait for each other.*rank 0 stops at SEND_F0",
    ):
        check(replace(lowered, orders=tuple(programs)))


@pytest.mark.parametrize("judge", [check, lower, simulate], ids=["check", "lower", "simulate"])
def test_what_is_no_schedule_is_refused_by_all(judge: Callable[..., object]) -> None:
    """Never an error of ours, always one that says what is wrong with theirs."""
    good = build("1f1b", ranks=2, microbatches=2)
    f, b = good.orders
    bad = (
        (f,),
        (f, b, ()),
        (f, ("F1.0",)),
        (f, (3, *b)),
        (f, (Action("F", 1, None), *b)),  # pyright: ignore[reportArgumentType]
        (f, (Action("X", 1, 0), *b)),
        (f, (Action("F", 7, 0), *b)),
        (f, (Action("F", 1, 99), *b)),
        (f, b[:-2]),
        (f, b[::-1]),
    )
    for orders in bad:
        with pytest.raises(ScheduleError):
            judge(replace(good, orders=orders))
    with pytest.raises(ScheduleError, match="costs of 3 stages for 2 stages"):
        judge(good, Costs.uniform(3))


def test_an_error_shows_the_grid_around_the_culprit() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    orders = (
        schedule.orders[0],
        (*schedule.orders[1][:2], Action("F", 0, 1), schedule.orders[1][3]),
    )
    with pytest.raises(ScheduleError) as caught:
        check(replace(schedule, orders=orders))
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
    with pytest.raises(
        ScheduleError, match="weight gradients of stage 1 run microbatch 4 before 0"
    ):
        check(lazy, weight_order="microbatch")
    check(replace(build("zb-h1", 4, 8), name="mine"), weight_order="microbatch")
