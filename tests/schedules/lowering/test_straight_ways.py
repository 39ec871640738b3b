"""Messages to stages that are not the next: placed without a deadlock, checked, simulated, written and read."""

import random

import pytest

from zbcompile.schedules import Costs, Schedule, build, check, lower, simulate
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import Action
from zbcompile.schedules.ir.costs import Link
from zbcompile.schedules.ir.files import from_json, to_json
from zbcompile.schedules.ir.schedule import Way, replace, require_ways

NAMES = ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b", "interleaved-zb", "dualpipe", "dualpipe-v", "v-half")


def with_ways(name: str, seed: int, ranks: int = 4) -> Schedule:
    schedule = build(name, ranks=ranks, microbatches=2 * ranks)
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(schedule.stages) for b in range(a + 2, schedule.stages)]
    chosen = sorted(draw.sample(pairs, draw.randint(1, len(pairs))))
    return replace(schedule, ways=tuple(Way(*pair, draw.random() < 0.8) for pair in chosen))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_any_ways_run_without_a_deadlock(name: str, seed: int) -> None:
    schedule = with_ways(name, seed)
    lowered = lower(schedule)
    check(lowered)
    rank = schedule.placement.rank
    sent = {a.op + str(a.stage) for program in lowered.orders for a in program if isinstance(a, Action)}
    for way in schedule.ways:
        if rank(way.source) != rank(way.target):
            hops = way.target - way.source
            assert f"SEND{hops}_F{way.source}" in sent
            assert (f"SEND{hops}_B{way.target}" in sent) == way.back


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_text_and_json_keep_the_ways(name: str) -> None:
    lowered = lower(with_ways(name, 1))
    assert from_json(to_json(lowered)).schedule == lowered


def test_a_message_that_is_missing_or_late_is_found() -> None:
    lowered = lower(replace(build("1f1b", ranks=4, microbatches=4), ways=(Way(0, 2, True),)))
    send = Action("SEND2_F", 0, 1)
    without = [tuple(step for step in program if step != send) for program in lowered.orders]
    with pytest.raises(ScheduleError, match=r"the SEND of RECV2_F2\.1 is missing"):
        check(replace(lowered, orders=tuple(without)))
    early = [list(program) for program in lowered.orders]
    early[0].remove(send)
    early[0].insert(0, send)
    with pytest.raises(ScheduleError):
        check(replace(lowered, orders=tuple(map(tuple, early))))


def test_a_slow_link_delays_what_comes_straight() -> None:
    """The pass waits for the message of the stage before it, and for that from further away."""
    schedule = replace(build("1f1b", ranks=4, microbatches=4), ways=(Way(0, 3, False),))
    near = Costs.uniform(4)
    slow = replace(near, links=(Link(0, 3, 50.0),))
    assert simulate(lower(schedule), near).makespan < simulate(lower(schedule), slow).makespan
    assert simulate(lower(replace(schedule, ways=())), slow).makespan == simulate(lower(schedule), near).makespan


@pytest.mark.parametrize("way", [(0, 1, True), (2, 1, True), (0, 4, True), (-1, 2, True), (0, "2", True), (0, 2, 1)])
def test_ways_that_no_program_has_are_refused(way: tuple[object, ...]) -> None:
    with pytest.raises(ScheduleError):
        require_ways([way], stages=4)
