"""Agreement of all ranks: a failure on one is raised on all, and ranks with different programs do
not start."""

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from zbcompile.distributed.mesh import PLACE
from zbcompile.distributed.ranks import Ranks

Result = TypeVar("Result")
Key = TypeVar("Key")


def together(ranks: Ranks, what: str, make: Callable[[], Result]) -> Result:
    """Run `make` on every rank; if it fails on one, every rank raises: its own error, or one that
    names that rank."""
    try:
        result, error = make(), None
    except Exception as caught:
        result, error = None, caught
    reports = ranks.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise ranks.watch.on_all_ranks(error)
    failed = [(rank, text) for rank, text in zip(ranks.members, reports, strict=True) if text]
    if failed:
        raise ranks.refusal(f"{what} failed on rank {failed[0][0]}: {failed[0][1]}")
    return result  # type: ignore[return-value]


def from_first(ranks: Ranks, what: str, make: Callable[[], Result]) -> Result:
    """Returns on every rank the result of `make` on the first rank of all. If it fails, every rank
    raises."""
    result = together(ranks, what, lambda: make() if ranks.is_first else None)
    return next(result for result in ranks.gather(result) if result is not None)


def agree(
    ranks: Ranks,
    values: Mapping[str, object],
    what: str,
    remedy: str,
    of_a_place: Collection[str] = (),
    dimensions: Sequence[str] = PLACE,
) -> None:
    """Raise on every rank if `values` differ, naming what differs and where: the ranks did `what`.

    The entries `of_a_place` must be equal only among ranks at the same place along `dimensions` of
    the mesh. Values are gathered only if their digests differ.
    """
    mesh, marks = ranks.mesh, []
    shared = {key: value for key, value in values.items() if key not in of_a_place}
    placed = [values.get(key) for key in of_a_place]
    for value, axes in (shared, ()), (placed, dimensions):
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
        pairs = torch.full((len(ranks.members), 2), -(1 << 62), device="cpu")
        pairs[mesh.index(*axes)] = torch.tensor([digest, -digest], device="cpu")
        marks.append(pairs)
    largest = ranks.largest(torch.cat(marks))
    largest = largest[largest[:, 0] >= 0]  # all comparisons have one size: some rows stay unused
    if bool((largest[:, 0] == -largest[:, 1]).all()):
        return
    every = ranks.gather(values)
    places = [mesh.index_of(mesh.place_of(rank), dimensions) for rank in ranks.members]
    keys = dict.fromkeys(key for report in every for key in report)
    reports = [
        {(key, place if key in of_a_place else None): report.get(key) for key in keys}
        for place, report in zip(places, every, strict=True)
    ]
    for (key, _), first, rank, expected, report in unlike(ranks.members, reports):
        where, reference, actual = first_difference(key, expected, report)
        raise ranks.refusal(
            f"the ranks {what}: {where} is {reference} on rank {first} and {actual} on rank {rank}."
            f" {remedy}"
        )


def unlike(
    members: Sequence[int],
    reports: Iterable[Mapping[Key, Result]],
    equal: Callable[[Result, Result], bool] = operator.eq,
) -> Iterator[tuple[Key, int, int, Result, Result]]:
    """Yields the differences between the `reports` of ranks: the key, the first rank that has it, a
    rank that has another value, and both values. Ranks may report different keys.

    >>> list(unlike([0, 1, 2], [{"a": 1, "b": 2}, {"a": 1}, {"b": 3}]))
    [('b', 0, 2, 2, 3)]
    """
    first: dict[Key, tuple[int, Result]] = {}
    for rank, report in zip(members, reports, strict=True):
        for key, value in report.items():
            source, expected = first.setdefault(key, (rank, value))
            if not equal(value, expected):
                yield key, source, rank, expected, value


def first_difference(name: str, first: Any, second: Any) -> tuple[str, Any, Any]:
    """The first entry in which lists of one length, or mappings with the same keys, differ, however
    deep.

    >>> first_difference("graphs", ["a", "b"], ["a", "c"])
    ('graphs[1]', 'b', 'c')
    """
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        keys = list(first)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        keys = list(range(len(first)))
    else:
        return name, first, second
    key = next(key for key in keys if first[key] != second[key])
    return first_difference(f"{name}[{key}]", first[key], second[key])
