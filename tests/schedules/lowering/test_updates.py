"""The optimizer's actions in an order: their text, what `check` proves of them, and what
they cost."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from zbcompile.schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    check,
    critical_path,
    lower,
    simulate,
    to_svg,
    with_updates,
)
from zbcompile.schedules.ir.actions import GATHER, OPT, REDUCE, VALIDATE, flatten
from zbcompile.schedules.lowering.updates import UPDATES

NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "v-min")
ONCE = ("VALIDATE", "GATHER", "REDUCE", "OPT")  # once for each stage
SUBSETS = [kinds for size in range(1, 5) for kinds in combinations(ONCE, size)]


def drawn() -> Iterator[tuple[Schedule, tuple[str, ...], Costs]]:
    generator = random.Random(0)
    for name in NAMES:
        for _ in range(4):
            schedule = build(name, ranks=generator.randint(1, 4), microbatches=8)
            stages = schedule.stages
            each = {
                field: tuple(generator.randint(0, 9) for _ in range(stages)) for field in FIELDS
            }
            yield schedule, generator.choice(SUBSETS), replace(Costs.uniform(stages), **each)


FIELDS = ("optimizer",)


def test_every_program_with_updates_is_right_and_its_times_add_up() -> None:
    for plain, kinds, costs in drawn():
        schedule, program = with_updates(plain, kinds), with_updates(lower(plain), kinds)
        assert schedule == program.compute_only()
        for each in (schedule, program, lower(schedule)):
            check(each)
            assert_consistent(simulate(each, costs), costs)


def assert_consistent(t: Timeline, costs: Costs) -> None:
    """Idle time and passes fill the step, so does its critical path; what waits has what it waits
    for."""
    assert sum(i.end - i.start for i in t.idle) + sum(t.busy) == t.finish * t.schedule.ranks
    assert (
        sum(leg.end - leg.start + leg.travel + leg.overhead for leg in critical_path(t)) == t.finish
    )
    if OPT in t.schedule.ops:
        assert (t.makespan, t.optimizer) == (t.finish, (0,) * t.schedule.ranks)
    spans = {
        (span.step.op, span.step.stage): span for span in t.spans if isinstance(span.step, Action)
    }
    for (op, stage), span in spans.items():
        if op == OPT:
            assert span.end - span.start == costs.optimizer[stage]
        if op == OPT and REDUCE in t.schedule.ops:
            assert span.start >= spans[REDUCE, stage].end


def test_an_update_takes_the_time_of_the_optimizer_and_has_a_look() -> None:
    schedule = with_updates(build("zb-h1", ranks=2, microbatches=2), ONCE)
    t = simulate(schedule, replace(Costs.uniform(2), optimizer=(1, 1)))
    assert t.makespan == simulate(build("zb-h1", ranks=2, microbatches=2)).makespan + 1
    assert f'fill="url(#{OPT})"' in to_svg(t)


def changed(schedule: Schedule, rank: int, order: list[object]) -> Schedule:
    orders = [order if number == rank else own for number, own in enumerate(schedule.orders)]
    return replace(schedule, orders=tuple(map(tuple, orders)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zb-v", "1f1b", "dualpipe-v"])
@pytest.mark.parametrize("kind", ONCE)
def test_an_action_too_early_too_late_twice_or_missing_is_found(name: str, kind: str) -> None:
    """Above all: no F reads parameters whose gathering is not awaited."""
    schedule = with_updates(build(name, ranks=4, microbatches=8), [kind])
    order = list(schedule.orders[1])
    stage = schedule.placement.stages_of(1)[0]
    action = Action(kind, stage, 0)
    rest = [step for step in order if step != action]
    first = next(i for i, step in enumerate(rest) if Action("F", stage, 0) in flatten((step,)))
    last = max(
        i
        for i, s in enumerate(rest)
        for a in flatten((s,))
        if a.stage == stage and a.op in ("W", "BW")
    )
    front = kind in (VALIDATE, GATHER)
    place = first + 1 if front else last
    damages = [
        (
            [*rest[:place], action, *rest[place:]],
            f"{action}: expected {'before' if front else 'after'} all",
        ),
        (rest, f"rank 1 never runs {kind} of stage {stage}"),
        ([*order, action], f"{action} appears a second time"),
        (
            [Action(kind, 99, 0), *order],
            f"{kind}99.0 is of stage 99, microbatch 0; this schedule has",
        ),
        (
            [Action(kind, stage, 1), *order],
            f"{kind}{stage}.1 appears a second time, .* or where nothing needs it",
        ),
    ]
    for damaged, message in damages:
        with pytest.raises(ScheduleError, match=message):
            check(changed(schedule, 1, damaged))


def test_two_model_copies_update_at_the_end_of_the_step() -> None:
    plain = build("dualpipe", ranks=4, microbatches=8)
    assert with_updates(plain, UPDATES) == plain


@pytest.mark.parametrize("kinds", [("NOPE",), "OPT", ("OPT", "F")])
def test_what_is_no_update_is_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(
        ScheduleError, match="expected a tuple with some of VALIDATE, GATHER, REDUCE, OPT"
    ):
        with_updates(build("zb-h1", ranks=2, microbatches=1), kinds)
