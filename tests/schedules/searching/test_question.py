"""Arguments that no search can be asked with are refused, with what was received."""

from collections.abc import Callable

import pytest

from zbcompile.schedules import Costs, ScheduleError, build, check, search

COSTS = Costs.uniform(4)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: build("zb-2p", 4, 8, memory_limit=float("nan")), "memory_limit=nan; expected"),
        (lambda: build("zb-2p", 4, 8, memory_limit=True), "memory_limit=True; expected"),
        (
            lambda: search(COSTS, 4, 8, memory_limit="80GiB"),
            "memory_limit='80GiB'; expected a number",
        ),
        (
            lambda: search(COSTS, 4, 8, memory_limit=[8, 8, 8, float("nan")]),
            "memory_limit=nan; expected",
        ),
        (
            lambda: search(COSTS, 4, 8, placements="linear"),
            r"placements='linear'; expected a list, such as \['linear'\]",
        ),
        (lambda: check(None), "received None; expected a Schedule"),
    ],
)
def test_what_cannot_be_asked(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ask()


def test_a_step_that_takes_no_time_can_be_shown() -> None:
    found = search(Costs.uniform(2, 0, 0, 0), 2, 2, placements=["linear"], passes=0)
    assert "the best name" in str(found)
