"""Bytes of spans of a line: what is held all the time, and of anything distinct that its operations use."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate, pairwise

import torch

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.partition.liveness import Line, held_behind


class DistinctBytes:
    """Bytes of the distinct things that are used within a span of the line, however often each is used there."""

    def __init__(self, uses: Iterable[tuple[int, Hashable, int]], length: int) -> None:
        """`uses` are `(position, thing, bytes)`."""
        sizes: dict[Hashable, int] = {}
        positions: dict[Hashable, set[int]] = defaultdict(set)
        for position, thing, size in uses:
            positions[thing].add(position)
            sizes[thing] = size
        at, repeated_from, repeated_at = ([0] * length for _ in range(3))
        self._around: list[list[tuple[int, int, int]]] = [[] for _ in range(length)]  # the uses before and after
        self._arcs: list[tuple[int, int, int]] = []  # a use, the next use of the same thing, its bytes
        for thing, found in positions.items():
            ordered = sorted(found)
            for position in ordered:
                at[position] += sizes[thing]
            for before, now, after in zip([-1, *ordered], ordered, [*ordered[1:], length], strict=False):
                self._around[now].append((before, after, sizes[thing]))
            for before, after in pairwise(ordered):
                repeated_from[before] += sizes[thing]
                repeated_at[after] += sizes[thing]
                self._arcs.append((before, after, sizes[thing]))
        self._arcs.sort(key=lambda arc: arc[0] - arc[1])
        self._lengths = [before - after for before, after, _ in self._arcs]
        self._used, self._from, self._at = (
            list(accumulate(values, initial=0)) for values in (at, repeated_from, repeated_at)
        )

    def within(self, begin: int, end: int) -> int:
        """Of the uses at positions `begin` to `end` - 1."""
        uses = self._used[end] - self._used[begin]
        around = self._arcs[: bisect_left(self._lengths, begin - end)]
        across = sum(size for before, after, size in around if before < begin and after >= end)
        repeats = (self._from[-1] - self._from[begin]) - (self._at[-1] - self._at[end]) + across
        return uses - repeats

    def growing(self, begin: int, end: int) -> list[int]:
        """Within each span from `begin` that ends before `end`: the first operation alone, two, and so on."""
        of_first = (sum(size for before, _, size in each if before < begin) for each in self._around[begin:end])
        return list(accumulate(of_first))

    def shrinking(self, begin: int, end: int) -> list[int]:
        """Within each span that ends at `end`: without the first operation, without two, and so on."""
        of_last = (sum(size for _, after, size in each if after >= end) for each in self._around[begin:end][::-1])
        return list(accumulate(of_last, initial=0))[-2::-1] if end > begin else []


class Footprint:
    """The bytes of any span of the line, `(begin, end)` in nodes.

    `resident` are parameters with their gradients and optimizer state, and buffers; `gradients` those of parameters, as
    they are summed; `shared` are those that several operations use.
    """

    def __init__(self, canonical: Canonical, line: Line, optimizer_state: float) -> None:
        length = len(line.nodes)
        trainable = canonical.captured.trainable
        held = list(_held(line))
        resident = ((i, n, _resident(value, n in trainable, optimizer_state)) for i, n, value in held)
        summed = ((i, n, _gradient(value)) for i, n, value in held if n in trainable)
        self.resident = DistinctBytes(resident, length).within
        self.gradients = DistinctBytes(summed, length).within
        self.shared = list(_shared(line, trainable, optimizer_state))


def gradient_bytes(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Of a parameter whose gradients are summed in `dtype`."""
    return value.numel() * dtype.itemsize


def state_bytes(value: torch.Tensor, optimizer_state: float) -> float:
    """What the optimizer holds of a parameter, with the float32 master of one in half precision."""
    if value.dtype in HALF:
        return value.numel() * 4 * (1 + optimizer_state)
    return value.nbytes * optimizer_state


def _resident(value: torch.Tensor, trains: bool, optimizer_state: float) -> int:
    if not trains:
        return value.nbytes
    return int(value.nbytes + _gradient(value) + state_bytes(value, optimizer_state))


def _gradient(value: torch.Tensor) -> int:
    return gradient_bytes(value, torch.float32 if value.dtype in HALF else value.dtype)


def _shared(line: Line, trainable: frozenset[str], optimizer_state: float) -> Iterator[tuple[list[int], int, int]]:
    """What several operations use: where, its bytes, and those of the sum that each stage makes of its gradients."""
    uses: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for i, name, value in _held(line):
        uses[name][i] = value
    for name, at in uses.items():
        value, trains = next(iter(at.values())), name in trainable
        if len(at) > 1:
            yield list(at), _resident(value, trains, optimizer_state), trains * _gradient(value)


def _held(line: Line) -> Iterable[tuple[int, str, torch.Tensor]]:
    on_line = frozenset(line.nodes)
    for i, node in enumerate(line.nodes):
        for holder in held_behind(node, on_line):
            yield i, holder.meta["slot"].name, holder.meta["val"]
