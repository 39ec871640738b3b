"""Every order of every name is the published one, action for action: one digest per name.

A digest covers the orders at equal times on 2 to 7 ranks, with `chunks`, `group` and `exact`, with
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
    "gpipe": "e9dbec36af01b234bd838fb598a0903a",
    "1f1b": "653e495680368ca870fb02eb46a5d184",
    "1f1b-overlap": "a16ddeb5b228a629af753b643f93daca",
    "interleaved-1f1b": "dbb7dc75ee515a9ed8552e2503f0dd1b",
    "interleaved-1f1b-overlap": "477a001a5785ca568d24134aba04cf97",
    "looped-bfs": "ab559032af6fbb087b1da284c760d673",
    "zb-h1": "d4bc29a3f719efbb39a85dc3d02fce2a",
    "zb-h1-lazy": "2a1d28dbe791b22d4b48d6f0a3ca5c13",
    "zb-h2": "090b20c0c7cecb9b470bfdc85c09e7e4",
    "zb-1p": "d4bc29a3f719efbb39a85dc3d02fce2a",
    "zb-2p": "12be346f0b1f5ba9404b4e8802b674ef",
    "interleaved-zb": "84581400524bc177ae0b150f2c034f4a",
    "zb-v": "deb7c3b2029dd1e23af9f1a05f81a42a",
    "v-half": "45a3964caf60090f12e6e4ee9308560f",
    "v-min": "2dfe53097ed35288681b0668ea64b89e",
    "dualpipe": "8f629dbb7496b021eb78fcf9740bfe44",
    "dualpipe-v": "bef5552c019310238e20c483304a9e56",
    "interlaced": "90a7f44a914e5b3bcd5930fe1f2df12a",
    "forward-only": "60008f460881b0185f92802dc04cb250",
}


def variants(name: str) -> Iterator[Schedule]:
    """Yields the schedules of a name, without messages."""
    if name == "interlaced":
        for ranks in (2, 3, 4, 7):
            yield from (interlaced(ranks, m) for m in (1, ranks, 2 * ranks + 3))
    elif name == "forward-only":
        for kind in ("linear", "looped:2", "v", "dual"):
            placement = Placement.parse(kind, 4)
            yield from (
                forward_only(placement, 6, s, lookups) for s in (0, 1) for lookups in (0, 1)
            )
    else:
        family = find(name)
        for ranks in (2, 3, 4, 7):
            for m in sorted({2, ranks, 2 * ranks, 2 * ranks + 2, 3 * ranks}):
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
