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
    "gpipe": "23922f83e4285ceabf7a3b084f70954d",
    "1f1b": "5632ab242317c146ee0cb26807a25b6d",
    "1f1b-overlap": "e0b5d793e9893ca91d87a87266820d57",
    "interleaved-1f1b": "f61fecdced6680d32f746efbeef5582e",
    "interleaved-1f1b-overlap": "e41f2fab4d21751960ff65afcc562377",
    "looped-bfs": "c9d42d2cce7ab5024e453081f33411fc",
    "zb-h1": "aa5cdf37dc0eb806922479fd76c6b1da",
    "zb-h1-lazy": "9baa0d8ca476e6d18dcda51a4c2be654",
    "zb-h2": "9d49effe8d132bfe0ad3320541a82643",
    "zb-1p": "aa5cdf37dc0eb806922479fd76c6b1da",
    "zb-2p": "98c4931577ee10f29dd78acefd726129",
    "interleaved-zb": "efd67991abf99714df0f7175bf522f41",
    "zb-v": "fa23d5b5a66fb34edcf5db306adacc90",
    "v-half": "80d2c5629adc111dd4aef338bd2ad4d1",
    "v-min": "ae2aa72a565156eadebe095909c0c072",
    "dualpipe": "badc5b3ff482373c0f9a6b62d547b53b",
    "dualpipe-v": "2cb157d284c70d06fe21fc6d065472d3",
    "interlaced": "11000ff421adc8311adea63e55b19a93",
    "forward-only": "60008f460881b0185f92802dc04cb250",
}


def variants(name: str) -> Iterator[Schedule]:
    """Yields the schedules of a name, without messages."""
    if name == "interlaced":
        for ranks in range(2, 9):
            yield from (interlaced(ranks, m) for m in (1, ranks, 2 * ranks + 3))
    elif name == "forward-only":
        for kind in ("linear", "looped:2", "v", "dual"):
            placement = Placement.parse(kind, 4)
            yield from (
                forward_only(placement, 6, s, lookups) for s in (0, 1) for lookups in (0, 1)
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
                groups = (ranks + 1, 2 * ranks)
                yield from (build(name, ranks, 2 * m, group=group) for group in groups)
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


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("name", NAMES)
def test_orders_are_the_published_ones(name: str) -> None:
    assert digest(name) == DIGESTS[name]


if __name__ == "__main__":
    print(*(f'    "{name}": "{digest(name)}",' for name in NAMES), sep="\n")
