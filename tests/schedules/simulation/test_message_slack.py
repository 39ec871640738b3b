"""Slack of messages: one message may be late by its slack, and by no more."""

import random

import pytest

from zbcompile.schedules import Action, build, lower, message_slack, simulate
from zbcompile.schedules.execution.event_loop import run
from zbcompile.schedules.ir.dependencies import target


class Late:
    """A draw in which one message, that for `user`, takes `factor` times as long."""

    def __init__(self, user: Action, factor: float) -> None:
        self.user, self.factor = user, factor

    def factors(self, action: Action) -> tuple[float, float]:
        return 1, self.factor if action == self.user else 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b", "v-min"])
def test_one_message_may_be_late_by_its_slack(name: str, random_costs) -> None:
    generator, seen = random.Random(name), 0
    while seen < 12:
        schedule = build(name, 3, 6)
        costs = random_costs(generator, schedule.stages)
        if not costs.comm:
            continue
        step = simulate(schedule, costs)
        late = generator.choice(message_slack(step))
        assert 0 <= late.early <= late.slack
        op, stage, microbatch = late.action
        user = Action(op, target(op, stage, schedule.stages) or 0, microbatch)
        for more, longer in ((late.slack, False), (late.slack + 1, True)):
            drawn = run(schedule, costs, Late(user, 1 + more / costs.comm))  # type: ignore[arg-type]
            finish = max(end[-1] for end in drawn.end)
            assert (round(finish, 6) > step.finish) == longer
        seen += 1


def test_a_lowered_program_has_the_same_messages_and_no_more_slack(random_costs) -> None:
    schedule = build("zb-v", 3, 6)
    costs = random_costs(random.Random(1), 6)
    plain, lowered = (message_slack(simulate(each, costs)) for each in (schedule, lower(schedule, costs)))
    assert [each[1:4] for each in lowered] == [each[1:4] for each in plain]
    assert all(tight.slack <= loose.slack for tight, loose in zip(lowered, plain, strict=True))
