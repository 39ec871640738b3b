"""The promise in one table: models, schedules and options, every run compared with the unsplit
eager model, bit for bit with `exact=True`.

The rows contain every pair of values of two columns, except that a model meets one schedule of each
family. `pytest --every-case` runs all rows, the suite those that add most pairs, with every value of
a column; `examples/benchmarks/oracle_sweep.py` runs every combination.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import combinations, product
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
Columns = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
TRIES = 40
FAMILIES = ("1f1b", "zb-h1", "zb-v", "interleaved-zb")
COLUMNS = {
    "problem": tuple(PROBLEMS),
    "schedule": tuple(name for name in names() if name != "zb-h1-lazy"),  # adds in another order
    "ranks": (1, 2, 3, 4),
    "exact": (True, False),
    "recompute": ("off", "selective", "full", 0.75),
    "least": (1, 5, 8),  # microbatches, or as many more as the schedule needs
}
SHORT = "frozen short-mlp small-dropout small-tied loss-scalar loss-mapping loss-object"


def pairs_of(columns: Columns) -> set[Pair]:
    """Returns every pair of values of two columns."""
    return {
        ((one, value), (second, beside))
        for one, second in combinations(columns, 2)
        for value, beside in product(columns[one], columns[second])
    }


def covering_rows(columns: Columns, missing: set[Pair]) -> list[Row]:
    """Returns valid rows such that each pair stands in one of them, if a valid row has it; at every
    call the same. A row is the best of several random ones around a pair."""
    choice, rows = random.Random(0), list[Row]()
    for pair in sorted(missing, key=repr):
        if pair in missing:
            drawn = [
                {name: choice.choice(values) for name, values in columns.items()} | dict(pair)
                for _ in range(TRIES)
            ]
            found = [(len(missing.intersection(combinations(r.items(), 2))), r) for r in drawn]
            valid = [item for item in found if is_valid(item[1])]
            rows += [max(valid, key=lambda item: item[0])[1]] if valid else []
            missing = missing.difference(combinations(rows[-1].items(), 2))
    return rows


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


def sampled_rows() -> list[Row]:
    """Returns the rows, each the one that adds most values and pairs to those before it."""
    pairs = {pair for pair in pairs_of(COLUMNS) if {name for name, _ in pair} != MODELS}
    pairs |= pairs_of({"problem": COLUMNS["problem"], "schedule": FAMILIES})
    rows, seen, result = covering_rows(COLUMNS, pairs), set[Any](), list[Row]()
    while rows:
        result.append(max(rows, key=lambda row: len(covered(row) - seen)))
        rows.remove(result[-1])
        seen |= covered(result[-1])
    return result


def covered(row: Row) -> set[Any]:
    return {*row.items(), *combinations(row.items(), 2)}


MODELS = {"problem", "schedule"}
SAMPLE = sampled_rows()
DAILY, SUITE = 5, 24


def marked(place: int, row: Row) -> Any:
    marks = [pytest.mark.slow] * (place >= DAILY) + [pytest.mark.beyond_sample] * (place >= SUITE)
    return pytest.param(row, marks=marks, id=title_of(row))


def title_of(row: Row) -> str:
    return " ".join(map(str, row.values()))


IN_PROCESSES = list(  # a row for every schedule
    {row["schedule"]: row for row in reversed(SAMPLE) if row["ranks"] == 2}.values()
)


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
