"""Bytes of spans of a line: parameters, gradients and optimizer state, divided among replicas or whole, and of anything
distinct that its operations use."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
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
        self._positions = {thing: sorted(found) for thing, found in positions.items()}
        at, repeated_from, repeated_at = ([0] * length for _ in range(3))
        self._around: list[list[tuple[int, int, int]]] = [[] for _ in range(length)]  # the uses before and after
        self._arcs: list[tuple[int, int, int]] = []  # a use, the next use of the same thing, its bytes
        for thing, ordered in self._positions.items():
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
        """Bytes of all that is used at positions `begin` to `end` - 1."""
        uses = self._used[end] - self._used[begin]
        around = self._arcs[: bisect_left(self._lengths, begin - end)]
        across = sum(size for before, after, size in around if before < begin and after >= end)
        repeats = (self._from[-1] - self._from[begin]) - (self._at[-1] - self._at[end]) + across
        return uses - repeats

    def uses(self, thing: Hashable, begin: int, end: int) -> bool:
        """Whether the thing is used at positions `begin` to `end` - 1."""
        found = self._positions.get(thing, [])
        at = bisect_left(found, begin)
        return at < len(found) and found[at] < end

    def growing(self, begin: int, end: int) -> list[int]:
        """`within(begin, e)` for every e from `begin` + 1 to `end`: of the first operation, of the first two, ..."""
        of_first = (sum(size for before, _, size in each if before < begin) for each in self._around[begin:end])
        return list(accumulate(of_first))

    def shrinking(self, begin: int, end: int) -> list[int]:
        """`within(b, end)` for every b from `begin` + 1 to `end`: without the first operation, without two, ..."""
        of_last = (sum(size for _, after, size in each if after >= end) for each in self._around[begin:end][::-1])
        return list(accumulate(of_last, initial=0))[-2::-1] if end > begin else []


@dataclass(frozen=True)
class ReplicaSharding:
    """How many replicas hold the same parameters, and what they divide: as `zero` of `pipe.optimizer`."""

    replicas: int = 1
    zero: int = 0

    @property
    def state_parts(self) -> int:
        """Into how many parts the optimizer's state is divided."""
        return self.replicas if self.zero else 1


ALONE = ReplicaSharding()


class Footprint:
    """The bytes of any span of the line, `(begin, end)` in nodes.

    * `resident`: parameters with their gradients and optimizer state, and buffers, on one of the replicas that divide
      them as `sharding` says;
    * `gradients`: the gradients of parameters, in the dtype in which they are summed;
    * `shared`: of each tensor that several operations use, where, its bytes, and those of the sum that each stage makes
      of its gradients.
    """

    def __init__(
        self, canonical: Canonical, line: Line, optimizer_state: float, sharding: ReplicaSharding = ALONE
    ) -> None:
        length = len(line.nodes)
        trainable, held = canonical.captured.trainable, list(_held(line))

        def resident(name: str, value: torch.Tensor) -> int:
            trains = name in trainable
            owned = int(state_bytes(value, optimizer_state) / sharding.state_parts) if trains else 0
            return value.nbytes + trains * _gradient(value) + owned

        summed = ((i, n, _gradient(value)) for i, n, value in held if n in trainable)
        self.resident = DistinctBytes(((i, n, resident(n, v)) for i, n, v in held), length).within
        self.gradients = DistinctBytes(summed, length).within
        uses = _uses(held)
        self.shared = [
            (at, resident(n, v), (n in trainable) * _gradient(v)) for n, (at, v) in uses.items() if len(at) > 1
        ]


def gradient_bytes(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a parameter's gradients, which are summed in `dtype`."""
    return value.numel() * dtype.itemsize


def state_bytes(value: torch.Tensor, optimizer_state: float) -> float:
    """What the optimizer holds of a parameter, with the float32 master of one in half precision."""
    if value.dtype in HALF:
        return value.numel() * 4 * (1 + optimizer_state)
    return value.nbytes * optimizer_state


def _gradient(value: torch.Tensor) -> int:
    return gradient_bytes(value, torch.float32 if value.dtype in HALF else value.dtype)


def _uses(held: Iterable[tuple[int, str, torch.Tensor]]) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Where operations use each tensor, by its name."""
    found: dict[str, tuple[list[int], torch.Tensor]] = {}
    for i, name, value in held:
        at = found.setdefault(name, ([], value))[0]
        if i not in at[-1:]:
            at.append(i)
    return found


def _held(line: Line) -> Iterable[tuple[int, str, torch.Tensor]]:
    on_line = frozenset(line.nodes)
    for i, node in enumerate(line.nodes):
        for holder in held_behind(node, on_line):
            yield i, holder.meta["slot"].name, holder.meta["val"]
