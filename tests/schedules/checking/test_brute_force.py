"""`check` gives random orders the verdict of an executor that was written for nothing else."""

import random
from dataclasses import replace

import pytest

from zbcompile.schedules import Schedule, ScheduleError, build, check
from zbcompile.schedules.ir.actions import BW, Action, B, F, W, flatten


def needed(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """Returns what an action waits for, by the definitions of F, B and W."""
    op, stage, m = action
    if op == F:
        return [(F, stage - 1, m)] if stage else []
    if op == W:
        return [(B, stage, m)]
    return [(F, stage, m), *([(B, stage + 1, m)] if stage + 1 < stages else [])]


def run(schedule: Schedule) -> bool:
    """Returns whether every rank runs its whole order, one step after the other."""
    done: set[tuple[str, int, int]] = set()
    position = [0] * schedule.ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            while position[rank] < len(order):
                actions = flatten(order[position[rank] : position[rank] + 1])
                microbatches = {(B, *a[1:]) for a in actions if a.op in (B, BW)}
                missing = {n for a in actions for n in needed(a, schedule.stages)} - done
                if missing - (microbatches if actions[-1].op == W else set()):
                    break
                for op, stage, m in actions:
                    done |= {(B, stage, m), (W, stage, m)} if op == BW else {(op, stage, m)}
                position[rank] += 1
                progress = True
    return all(at == len(order) for at, order in zip(position, schedule.orders, strict=True))


def is_right(schedule: Schedule) -> bool:
    """Returns whether every pass is there once, on its rank, in an order of microbatches, and all finish."""
    for rank, order in enumerate(schedule.orders):
        actions = flatten(order)
        passes = [(op, *a[1:]) for a in actions for op in ((B, W) if a.op == BW else (a.op,))]
        stages, microbatches = schedule.placement.stages_of(rank), range(schedule.microbatches)
        if sorted(passes) != sorted(
            (op, s, m) for op in (F, B, W) for s in stages for m in microbatches
        ):
            return False
        for stage in stages:
            for op in (F, W) if stage == schedule.stages - 1 else (W,):
                if [m for o, s, m in passes if (o, s) == (op, stage)] != list(microbatches):
                    return False
    return run(schedule)


def shuffled(schedule: Schedule, generator: random.Random) -> Schedule:
    """The schedule with a few steps moved, dropped, repeated or put on another rank."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(generator.choice((0, 1, 1, 2, 3))):
        order = generator.choice(orders)
        place, kind = generator.randrange(len(order)), generator.random()
        if kind < 0.8:
            order.insert(max(0, place + generator.choice((-3, -1, 1, 2))), order.pop(place))
        elif kind < 0.9:
            generator.choice(orders).append(order.pop(place))
        else:
            order.insert(place, order[place])
    return replace(schedule, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "1f1b-overlap"])
def test_the_verdict_of_an_executor(name: str) -> None:
    generator, verdicts = random.Random(name), {True: 0, False: 0}
    for _ in range(100):
        schedule = shuffled(build(name, generator.randint(2, 4), 8), generator)
        try:
            check(schedule)
            verdict = True
        except ScheduleError:
            verdict = False
        assert verdict == is_right(schedule), schedule
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 10
