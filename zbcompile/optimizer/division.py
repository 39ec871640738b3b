"""How the parameters of a bucket are divided among replicas: as one row of elements cut into equal parts, or by whole
matrices, so that each replica has about as much to compute."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Piece:
    """The elements from `begin` to `end` of a parameter, in the order of its memory; in the bucket they are at `at`."""

    name: str
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Division:
    """`shares[i]` are the pieces of replica i, whose part of the bucket has `chunk` elements, padding included."""

    shares: tuple[tuple[Piece, ...], ...]
    chunk: int

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for share in self.shares for piece in share)


def by_elements(shapes: Mapping[str, Sequence[int]], loads: list[int]) -> Division:
    """One parameter after the other, cut into as many equal parts as there are `loads`, wherever these end.

    >>> by_elements({"a": (2, 3), "b": (1,)}, [0, 0]).shares[1]
    (Piece(name='a', begin=4, end=6, at=4), Piece(name='b', begin=0, end=1, at=6))
    """
    chunk = -(-sum(map(prod, shapes.values())) // len(loads))
    shares: list[list[Piece]] = [[] for _ in loads]
    at = 0
    for name, shape in shapes.items():
        begin, size = 0, prod(shape)
        while begin < size:
            replica = at // chunk
            end = min(size, begin + (replica + 1) * chunk - at)
            shares[replica].append(Piece(name, begin, end, at))
            at, begin = at + end - begin, end
    return Division(tuple(map(tuple, shares)), chunk)


def by_matrices(shapes: Mapping[str, Sequence[int]], loads: list[int]) -> Division:
    """Each one whole: the costliest first, to the replica that has the least to do so far, as `loads` says, which are
    raised. An update multiplies a matrix by its own square, along its shorter side.

    >>> division = by_matrices({"a": (2, 3), "b": (2, 2), "c": (2, 2)}, [0, 0])
    >>> [[piece.name for piece in share] for share in division.shares], division.chunk
    ([['a'], ['b', 'c']], 8)
    """
    costs = {name: prod(shape) * min(shape, default=1) for name, shape in shapes.items()}
    owned: list[list[str]] = [[] for _ in loads]
    for name in sorted(costs, key=lambda name: -costs[name]):
        replica = loads.index(min(loads))
        loads[replica] += costs[name]
        owned[replica].append(name)
    chunk = max(sum(prod(shapes[name]) for name in names) for names in owned)
    return Division(tuple(tuple(_whole(names, shapes, i * chunk)) for i, names in enumerate(owned)), chunk)


def _whole(names: Sequence[str], shapes: Mapping[str, Sequence[int]], at: int) -> Iterator[Piece]:
    for name in names:
        yield Piece(name, 0, prod(shapes[name]), at)
        at += prod(shapes[name])
