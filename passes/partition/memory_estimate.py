"""Residency: the bytes that a rank holds for the stages between given cuts, estimated before anything is compiled.

The estimate counts parameters, their gradients, the optimizer's state, buffers, and what autograd keeps of each
microbatch between its forward and its weight gradients. The compiled program takes less: it recomputes, and B frees
values before W.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Interpreter, Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.graph.fx import leaf_like
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.partition.balance import Spans
from zbcompile.passes.partition.liveness import Line, held_behind
from zbcompile.passes.partition.running_bytes import Stored
from zbcompile.passes.torch_private import storage_key


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
        self._arcs: list[tuple[int, int, int]] = []  # a use, the next use of the same thing, its bytes
        for thing, found in positions.items():
            ordered = sorted(found)
            for position in ordered:
                at[position] += sizes[thing]
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


class Footprint:
    """The bytes of any span of the line, `(begin, end)` in nodes.

    `resident` are parameters with their gradients and optimizer state, and buffers; `gradients` those of parameters, as
    they are summed; `kept` is what autograd keeps of one microbatch from its forward on.
    """

    def __init__(self, canonical: Canonical, line: Line, optimizer_state: float) -> None:
        length = len(line.nodes)
        trainable = canonical.captured.trainable
        held = list(_held(line))
        resident = ((i, n, _resident(value, n in trainable, optimizer_state)) for i, n, value in held)
        summed = ((i, n, _gradient(value)) for i, n, value in held if n in trainable)
        self.resident = DistinctBytes(resident, length).within
        self.gradients = DistinctBytes(summed, length).within
        self.stored = _stored(canonical, line)
        self.kept = DistinctBytes(self.stored.kept, length).within
        self.shared = list(_shared(line, trainable, optimizer_state))


class Residency:
    """The memory of ranks. `waiting[rank]` lists how many microbatches of each of its stages wait at the same time, at
    the peaks of the schedule (see `zbcompile.schedules.execution.memory.most_waiting`)."""

    def __init__(self, footprint: Footprint, waiting: Sequence[Sequence[Mapping[int, int]]]) -> None:
        self._footprint, self._waiting = footprint, waiting

    def bytes(self, rank: int, spans: Spans) -> float:
        """Bytes of `rank` with its stages at `spans`: `(stage, begin, end)` in nodes of the line."""
        kept = {stage: self._footprint.kept(a, b) for stage, a, b in spans}
        waiting = max(sum(counts.get(stage, 0) * kept[stage] for stage in kept) for counts in self._waiting[rank])
        return sum(self._footprint.resident(a, b) for _, a, b in spans) + waiting


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


class _Keeping(Interpreter):
    """Runs a graph under autograd and notes which storages each node makes autograd keep."""

    def __init__(self, canonical: Canonical) -> None:
        super().__init__(canonical.module, garbage_collect_values=False)
        self.kept: dict[Node, list[torch.Tensor]] = defaultdict(list)

    def run_node(self, n: Node) -> Any:
        def note(tensor: torch.Tensor) -> torch.Tensor:
            self.kept[n].append(tensor)
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return super().run_node(n)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
        value = super().run_node(n)  # an autograd.Function that calls torch.func, which allows no such hooks
        self.kept[n] = [kept for each in tensors_of(value) for kept in getattr(each.grad_fn, "saved_tensors", ())]
        return value


def _storages(values: Iterable[torch.Tensor]) -> dict[int, int]:
    """The storages behind tensors, of a DTensor that of this rank's part, with their bytes."""
    with torch.no_grad():
        parts = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    return {storage_key(part): part.untyped_storage().nbytes() for part in parts}


def _stored(canonical: Canonical, line: Line) -> Stored:
    """What a forward under autograd stores; parameters, buffers and the user's inputs are not kept by it."""
    runner = _Keeping(canonical)
    with canonical.mode, torch.enable_grad():
        holders = canonical.graph.find_nodes(op="placeholder")
        inputs = [leaf_like(node, canonical.captured.trainable) for node in holders]
        runner.run(*inputs)
    given = (value for node, value in zip(holders, inputs, strict=True) if node.meta["slot"].kind != "activation")
    whole = {storage_key(value) for value in given if isinstance(value, torch.Tensor)}
    kept = [(at, *each) for at, node in enumerate(line.nodes) for each in _storages(runner.kept[node]).items()]
    behind = {node: _storages(tensors_of(value)) for node, value in runner.env.items()}
    return Stored(behind, [each for each in kept if each[1] not in whole])
