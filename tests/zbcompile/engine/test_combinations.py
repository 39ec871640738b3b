"""The promise in one table: models, schedules and options, every run compared with the unsplit
eager model, bit for bit with `exact=True`.

A row is drawn such that it adds most pairs of values of two columns to those before it.
`pytest --every-case` runs all, the suite the first, which have every value of a column;
`examples/benchmarks/oracle_sweep.py` runs every combination.
"""

import random
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest

from tests.support.oracle import PROBLEMS
from tests.support.ordered import InOrder
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    Trained,
    assert_bitwise,
    assert_close,
    compile_for_forks,
    join,
    quickly,
    reference,
)
from zbcompile.schedules import Schedule, ScheduleError, build, names, smallest_microbatches

Row = dict[str, Any]
TRIES = 100
COLUMNS = {
    "problem": tuple(PROBLEMS),
    "schedule": tuple(name for name in names() if name != "zb-h1-lazy"),  # adds in another order
    "ranks": (1, 2, 3, 4),
    "exact": (True, False),
    "recompute": ("off", "selective", "full", 0.75),
    "least": (1, 5, 8),  # microbatches, or as many more as the schedule needs
}
SHORT = "frozen short-mlp small-dropout small-tied loss-scalar loss-mapping loss-object"


@cache
def schedule_of(name: str, ranks: int, least: int) -> Schedule | None:
    """Returns a schedule, None if it does not exist for so many ranks."""
    try:
        return build(name, ranks, smallest_microbatches(name, ranks, at_least=least))
    except ScheduleError:
        return None


def is_valid(row: Row) -> bool:
    """Returns True if the model has as many stages as the schedule."""
    schedule = schedule_of(row["schedule"], row["ranks"], row["least"])
    return schedule is not None and schedule.stages <= (4 if row["problem"] in SHORT.split() else 8)


def drawn_rows(count: int) -> list[Row]:
    """Returns valid rows, each the one of several random ones that adds most values and pairs to the
    rows before it; at every call the same."""
    choice, seen, rows = random.Random(0), set[Any](), list[Row]()
    for _ in range(count):
        drawn = [
            {name: choice.choice(values) for name, values in COLUMNS.items()} for _ in range(TRIES)
        ]
        rows.append(max(filter(is_valid, drawn), key=lambda row: len(covered(row) - seen)))
        seen |= covered(rows[-1])
    return rows


def covered(row: Row) -> set[Any]:
    return {*row.items(), *combinations(row.items(), 2)}


DAILY, SUITE, ALL = 5, 48, 140
SAMPLE = drawn_rows(ALL)


def marked(place: int, row: Row) -> Any:
    marks = [pytest.mark.slow] * (place >= DAILY) + [pytest.mark.beyond_sample] * (place >= SUITE)
    return pytest.param(row, marks=marks, id=title_of(row))


def title_of(row: Row) -> str:
    return " ".join(map(str, row.values()))


TWO = [row for row in reversed(SAMPLE) if row["ranks"] == 2 and row["exact"]]
IN_PROCESSES = list({row["schedule"]: row for row in TWO}.values())  # at most one of a schedule


def case_of(row: Row) -> Case:
    """Returns a run of one step, or of two with `exact=True`: an optimizer makes much of small
    differences."""
    schedule = schedule_of(row["schedule"], row["ranks"], row["least"])
    assert schedule is not None
    options = {name: value for name, value in row.items() if name != "least"}
    return Case(microbatches=schedule.microbatches, steps=1 + row["exact"], **options)


def assert_promise(case: Case, trained: Trained) -> None:
    (assert_bitwise if case.exact else assert_close)(trained, reference(case))


@pytest.mark.parametrize("row", [marked(place, row) for place, row in enumerate(SAMPLE)])
def test_in_one_process(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are paired by their order on each channel alone, as NCCL pairs them."""
    case = case_of(row)
    schedule = build(case.schedule, case.ranks, case.microbatches)
    in_order = partial(InOrder, rank_of=schedule.rank_of)
    monkeypatch.setattr("zbcompile.distributed.ranks.Transport", in_order)
    assert_promise(case, quickly(case))


@pytest.mark.mostly_slow(every=7)
@pytest.mark.slow
@pytest.mark.parametrize("row", IN_PROCESSES, ids=title_of)
def test_in_processes(row: Row, pool: Pool) -> None:
    case = case_of(row)
    compile_for_forks(case)
    assert_promise(case, join(pool.run(quickly, case, ranks=case.ranks)))
