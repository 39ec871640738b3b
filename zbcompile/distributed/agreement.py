"""Agreement of all ranks: a failure on one is raised on all, and ranks with different programs do not start."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from zbcompile.distributed.mesh import PLACE
from zbcompile.distributed.ranks import Ranks

Result = TypeVar("Result")


def together(ranks: Ranks, what: str, make: Callable[[], Result]) -> Result:
    """Run `make` on every rank; if it fails on one, every rank raises: its own error, or one that names that rank."""
    result, error = None, None
    try:
        result = make()
    except Exception as caught:
        error = caught
    report = None if error is None else f"{type(error).__name__}: {error}"
    with ranks.watch.position.waiting("the agreement"):
        reports = ranks.gather(report)
    if error is not None:
        raise ranks.watch.known_to_all(error, alike=report == reports[0])
    failed = [(rank, text) for rank, text in zip(ranks.members, reports, strict=True) if text]
    if failed:
        raise ranks.refusal(f"{what} failed on rank {failed[0][0]}: {failed[0][1]}")
    return result  # type: ignore[return-value]


def gathered(ranks: Ranks, value: Result) -> list[Result]:
    """The value of every rank, on every rank."""
    with ranks.watch.position.waiting("the exchange"):
        return ranks.gather(value)


def equal_everywhere(ranks: Ranks, count: int, value: object, compare: bool) -> bool:
    """Whether all ranks have one count and, if any of them asks to `compare`, one value by its repr. One reduction of
    five numbers: cheap enough for every step, where gathering objects is not."""
    mark = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    with ranks.watch.position.waiting("the exchange"):
        most, least, high, low, compared = ranks.largest_of_hosts([count, -count, mark, -mark, compare])
    return most == -least and (not compared or high == -low)


def from_first(ranks: Ranks, what: str, make: Callable[[], Result]) -> Result:
    """What the first rank of all makes, on every rank; if it fails, every rank raises."""
    found = gathered(ranks, together(ranks, what, lambda: make() if ranks.is_first else None))
    return next(each for each in found if each is not None)


COMPILED = "compiled different programs"
BUILD = (
    "Every rank must build the same model, use the same versions and switches, and pass the same batch shapes and "
    "options."
)


def require_equal_programs(
    ranks: Ranks,
    manifest: Mapping[str, object],
    what: str = COMPILED,
    remedy: str = BUILD,
    of_a_place: Sequence[str] = (),
) -> None:
    """Raise on every rank when the manifests, or the terms of the ranks, differ, naming what differs and where: the
    ranks did `what`. The entries `of_a_place` must be equal along the pipeline and replicas only."""
    with ranks.watch.position.waiting("the comparison of programs"):
        manifests = ranks.gather({**ranks.terms, **manifest})
    first: dict[object, int] = {}  # the first rank at every place
    for index, (rank, other) in enumerate(zip(ranks.members, manifests, strict=True)):
        here = first.setdefault(ranks.mesh.index_of(ranks.mesh.place_of(rank), PLACE), index)
        for key, value in manifests[0].items():
            expected, source = (manifests[here][key], here) if key in of_a_place else (value, 0)
            if other[key] != expected:
                where, one, there = first_difference(key, expected, other[key])
                text = f"the ranks {what}: {where} is {one} on rank {ranks.members[source]} and {there} on rank {rank}."
                raise ranks.refusal(f"{text} {remedy}")


def agreed_seconds(ranks: Ranks, seconds: Mapping[str, float]) -> dict[str, float]:
    """The median of measured times over all ranks, so that all of them choose the same cuts."""
    with ranks.watch.position.waiting("the comparison of measured times"):
        reports = ranks.gather(dict(seconds))
    keys = dict.fromkeys(key for report in reports for key in report)
    return {key: median(report[key] for report in reports if key in report) for key in keys}


def first_difference(name: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The first entry in which lists of one length, or mappings with the same keys, differ, however deep.

    >>> first_difference("graphs", ["a", "b"], ["a", "c"])
    ('graphs[1]', 'b', 'c')
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        entries = [(str(key), one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        entries = [(str(index), a, b) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return name, one, other
    key, a, b = next(entry for entry in entries if entry[1] != entry[2])
    return first_difference(f"{name}[{key}]", a, b)
