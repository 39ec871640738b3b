"""Rows of a table of options that contain every pair of values."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
TRIES = 40


def pairs_of(columns: Columns) -> set[Pair]:
    """Returns every pair of values of two columns."""
    return {
        ((one, value), (second, beside))
        for one, second in combinations(columns, 2)
        for value, beside in product(columns[one], columns[second])
    }


def covering_rows(columns: Columns, pairs: set[Pair], is_valid: Callable[[Row], bool]) -> list[Row]:
    """Returns valid rows such that each of `pairs` stands in one of them, if a valid row has it.

    The rows are the same at every call. A row is the best of several random ones around a pair.
    """
    choice, rows, missing = random.Random(0), list[Row](), set(pairs)
    for pair in sorted(missing, key=repr):
        candidates = list(_rows_with(pair, columns, is_valid, choice)) if pair in missing else []
        if candidates:
            rows.append(max(candidates, key=lambda row: len(missing & _pairs_in(row))))
            missing -= _pairs_in(rows[-1])
    return rows


def _rows_with(
    pair: Pair, columns: Columns, is_valid: Callable[[Row], bool], choice: random.Random
) -> Iterator[Row]:
    for _ in range(TRIES):
        row = {name: choice.choice(values) for name, values in columns.items()} | dict(pair)
        if is_valid(row):
            yield row


def _pairs_in(row: Row) -> set[Pair]:
    return set(combinations(row.items(), 2))
