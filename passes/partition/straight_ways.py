"""Which way a value takes to the stages that read it: straight to them, kept by a rank that has it, or through all.

A way is a tree: every stage gets the value once, from a stage that has it, and sends back one gradient, to which the
gradients of what it has passed on were added before. Eager adds the gradients of a value from its last reader to its
first, one at a time; a tree has these bits if, at every stage, what all but the last stage that gets the value from
there send back is the gradient of a single reader (`adds_in_order`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

Parents = Mapping[int, int]  # by stage: the stage from which it gets a value
FARTHEST = 64  # stages that a message goes: as in `zbcompile.schedules.ir.kinds`


def way_of(maker: int, readers: Mapping[int, int], owners: Sequence[Hashable] | None, in_order: bool) -> Parents:
    """From where each stage gets a value that `maker` makes; `readers` has how often each later stage reads it.

    `owners` are the ranks of the stages, None: it goes through all stages. With `in_order` gradients are added in the
    order of eager. Of the ways with the fewest messages between ranks, the one with the fewest between stages that are
    no neighbours.

    >>> way_of(0, {3: 1}, "abcd", True), way_of(0, {3: 1}, None, True)
    ({3: 0}, {1: 0, 2: 1, 3: 2})
    >>> way_of(0, {1: 1, 2: 1, 3: 1}, "abba", False)
    {1: 0, 2: 1, 3: 0}
    """
    relay = {stage: stage - 1 for stage in range(maker + 1, max(readers) + 1)}
    if owners is None:
        return relay

    def price(way: Parents) -> tuple[int, int]:
        between = sum(owners[stage] != owners[parent] for stage, parent in way.items())
        return between, sum(stage - parent > 1 for stage, parent in way.items())

    ways = [way for way in _ways(maker, sorted(readers), owners) if not in_order or adds_in_order(way, readers)]
    near = [way for way in ways if all(stage - parent <= FARTHEST for stage, parent in way.items())]
    return min([relay, *near], key=price)


def _ways(maker: int, readers: Sequence[int], owners: Sequence[Hashable]) -> Iterator[Parents]:
    """From the maker alone or from the reader before; with either, kept by a rank that has the value already."""
    choices: list[Callable[[list[int]], int]] = [lambda holders: holders[-1], lambda holders: maker]
    for otherwise in choices:
        for keeps in (True, False):
            way, holders = dict[int, int](), [maker]
            for stage in readers:
                own = [holder for holder in holders if keeps and owners[holder] == owners[stage]]
                way[stage] = own[-1] if own else otherwise(holders)
                holders.append(stage)
            yield way


def adds_in_order(way: Parents, readers: Mapping[int, int]) -> bool:
    """Whether the gradients of a value are added from its last reader to its first, one at a time.

    >>> once = {1: 1, 2: 1, 3: 1}
    >>> adds_in_order({1: 0, 2: 1, 3: 0}, once), adds_in_order({1: 0, 2: 0, 3: 2}, once)
    (False, True)
    >>> adds_in_order({1: 0, 2: 0, 3: 2}, {**once, 1: 2})
    False
    """
    given: dict[int, list[int]] = {}
    for stage, parent in way.items():
        given.setdefault(parent, []).append(stage)
    one_reader = {stage for stage, count in readers.items() if count == 1 and stage not in given}
    return all(stage == max(stages) or stage in one_reader for stages in given.values() for stage in stages)
