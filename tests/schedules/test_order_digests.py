"""Every order of every name is the published one, action for action: one digest per name.

A digest covers the orders at equal times on 2 to 8 ranks, with `chunks`, `group` and `exact`, with
vocabulary passes, and all of them with their messages. Run this file as a script to print the
table.
"""

import hashlib
from collections.abc import Iterator

import pytest

from zbcompile.schedules import (
    Placement,
    Schedule,
    admits,
    build,
    interlaced,
    lower,
    names,
    with_vocabulary,
)
from zbcompile.schedules.generators.forward_only import forward_only
from zbcompile.schedules.generators.registry import find

DIGESTS = {
    "gpipe": "a2cf9fe7523fc1543f7da6dd3439bd7d",
    "1f1b": "4f5d6277253b77e8ea78c68bfb9c525e",
    "1f1b-overlap": "1626d61f7936360c53e4f2daddb78288",
    "interleaved-1f1b": "b618ef7f6970baaf87891e382b7974a8",
    "interleaved-1f1b-overlap": "00386626273d9b72e43786bf7efa3d0d",
    "looped-bfs": "dc450095477cfda1d350858494d59dac",
    "zb-h1": "58061a2553b386824aa9e13f99948852",
    "zb-h1-lazy": "8982f27958ed10c6e36596e8e31c6942",
    "zb-h2": "447d69abae017798b6659c5c613400b7",
    "zb-1p": "58061a2553b386824aa9e13f99948852",
    "zb-2p": "1e9a97d2c39c83c6ac9a993458cbdf42",
    "interleaved-zb": "b3a5af14ca0bac366b1dddf0ab22e8bc",
    "zb-v": "c9090afebbceff7ca991133d8638f3ef",
    "v-half": "9852656ac6e1fd2bc375951122c68d46",
    "v-min": "ed5851f4594d777247e0a0f8cd3e7216",
    "dualpipe": "badc5b3ff482373c0f9a6b62d547b53b",
    "dualpipe-v": "0903f06cb09b1105c8ba4ac58e4d73ef",
    "interlaced": "98b94f645f03f94418b02fd84591a889",
    "forward-only": "bca698370de449a0a1ce67d4cc8213fe",
}


def variants(name: str) -> Iterator[Schedule]:
    """Yields the schedules of a name, without messages."""
    if name == "interlaced":
        yield from (
            interlaced(ranks, m) for ranks in range(2, 9) for m in (1, ranks, 2 * ranks + 3)
        )
    elif name == "forward-only":
        placements = [Placement.parse(kind, 4) for kind in ("linear", "looped:2", "v", "dual")]
        for placement in placements:
            yield from (
                forward_only(placement, 6, shards, lookups)
                for shards in (0, 1)
                for lookups in (0, 1)
            )
    else:
        family = find(name)
        for ranks in range(2, 9):
            for m in sorted({2, ranks, 2 * ranks, 2 * ranks + 2, 3 * ranks, 4 * ranks}):
                if admits(name, ranks, m):
                    yield build(name, ranks, m)
        for ranks, m in ((2, 4), (3, 6), (4, 8)):
            if family.free_chunks:
                yield from (build(name, ranks, m, chunks=chunks) for chunks in (1, 3, 4))
            if "group" in family.options:
                yield from (
                    build(name, ranks, 2 * m, group=group) for group in (ranks + 1, 2 * ranks)
                )
            if "exact" in family.options:
                yield build(name, ranks, m, exact=True)
            if family.placement != "dual":
                schedule = build(name, ranks, m)
                yield from (with_vocabulary(schedule, barriers) for barriers in (1, 2))


def digest(name: str) -> str:
    """Returns the first half of a SHA-256 of all orders of a name."""
    found = hashlib.sha256()
    for schedule in variants(name):
        for each in (schedule, lower(schedule)):
            found.update(repr([list(map(str, order)) for order in each.orders]).encode())
    return found.hexdigest()[:32]


NAMES = (*(name for name in names() if name != "auto"), "interlaced", "forward-only")


@pytest.mark.parametrize("name", NAMES)
def test_orders_are_the_published_ones(name: str) -> None:
    assert digest(name) == DIGESTS[name]


if __name__ == "__main__":
    print(*(f'    "{name}": "{digest(name)}",' for name in NAMES), sep="\n")
