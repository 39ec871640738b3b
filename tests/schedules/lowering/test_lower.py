"""Schedule programs: what is placed where, and that no cost can make them deadlock."""

from collections import Counter

import pytest

from zbcompile.schedules import Action, Schedule, ScheduleError, build, check, lower
from zbcompile.schedules.ir.actions import RECEIVES, flatten


@pytest.mark.parametrize(
    ("name", "per_microbatch"),
    [("1f1b", 2 * 3), ("zb-v", 4 * 3), ("interleaved-1f1b", 2 * 7), ("dualpipe", 2 * 3)],
)
def test_message_counts(name: str, per_microbatch: int) -> None:
    """2(p-1) on one chunk or two copies, 4(p-1) on a V, 2(vp-1) on a loop. Wide programs are right."""
    lowered = lower(build(name, ranks=4, microbatches=8))
    ops = Counter(step[0] for program in lowered.orders for step in program)
    assert (ops["SEND_F"], ops["SEND_B"]) == (ops["RECV_F"], ops["RECV_B"])
    assert ops["SEND_F"] + ops["SEND_B"] == 8 * per_microbatch
    check(lower(build(name, ranks=16, microbatches=32)))


def _open_receives(name: str, ranks: int, microbatches: int) -> int:
    """The most receives of a rank that are posted and whose consumer has not run."""
    lowered, most = lower(build(name, ranks, microbatches)), 0
    for order in lowered.orders:
        posted: set[tuple[str, int, int]] = set()
        for op, stage, microbatch in flatten(order):
            posted |= {(op[-1], stage, microbatch)} if op in RECEIVES else set()
            most = max(most, len(posted))
            posted -= {(op[0], stage, microbatch)} if op in ("F", "B", "BW") else set()
    return most


def test_receives_do_not_pile_up() -> None:
    """The number of open receives does not grow with the number of microbatches."""
    for name in ("1f1b", "zb-h2", "zb-v", "dualpipe-v", "interleaved-1f1b"):
        assert _open_receives(name, 4, 16) == _open_receives(name, 4, 64), name
    assert _open_receives("zb-v", 8, 64) == _open_receives("1f1b", 8, 64) == 3


def test_an_edited_order_is_lowered_safely() -> None:
    """Any order that can run at all: rank 0 delays its backwards, rank 1 runs its forwards late."""
    schedule = build("zb-h1", ranks=2, microbatches=4)
    eager = (*(("F", m) for m in range(4)), *((op, m) for m in range(4) for op in "BW"))
    order = tuple(Action(op, 0, m) for op, m in eager)
    check(lower(Schedule("edited", schedule.placement, 4, (order, schedule.orders[1]))))


def test_orders_that_wait_for_each_other_are_refused() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    orders = (schedule.orders[0], tuple(reversed(schedule.orders[1])))
    message = r"(?s)rank 1 runs BW1.1 before F1.1.*rank 1 stops at BW1.1"
    with pytest.raises(ScheduleError, match=message):
        lower(Schedule("edited", schedule.placement, 2, orders))
