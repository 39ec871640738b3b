"""What is alive while a pass of a stage runs, and what waits for W: estimated from the operations of the line, between
any two cuts, before anything is compiled."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.process_groups import is_under_way
from zbcompile.passes.graph.rematerialize import can_remake
from zbcompile.passes.graph.storage import storage_bytes, tensors_of
from zbcompile.passes.partition.liveness import Line

NEVER, ARRIVED, NOWHERE = 1 << 60, -1, -2  # positions of what is not on the line


class Stored(NamedTuple):
    """What a forward under autograd stored: the storages behind the values of each node with their bytes, and what
    autograd keeps, as (position on the line, storage, bytes)."""

    behind: Mapping[Node, Mapping[int, int]]
    kept: Sequence[tuple[int, int, int]]


class Running(NamedTuple):
    """Bytes of one microbatch on a stage: what waits between F and B and between B and W, and the most that is alive
    while F and B run."""

    kept: int
    residue: int
    forward: int
    backward: int


class _Kept(NamedTuple):
    """What autograd keeps at an operation: where it did so before, where it was made, where W reads it from here on."""

    before: int
    made: int
    weight: int
    size: int


@dataclass
class _Place:
    """An operation: bytes of its results (`made`), of what it reads for the last time (`ends`, with where that was made
    and whether autograd keeps it), and of what cannot be recomputed (`fixed`; of what a `collective` made, nothing
    before it is recomputed). Its backward makes bytes of gradients (`arrive`), hands on that of its result (`follow`),
    which it consumes otherwise (`consumed`, with the last use of the value), and leaves some for W (`left`). `inside`:
    what the two need of their own."""

    left: int
    kept: list[_Kept] = field(default_factory=list)
    inside: list[int] = field(default_factory=lambda: [0, 0])
    fixed: int = 0
    collective: bool = False
    made: int = 0
    ends: list[tuple[int, bool, int]] = field(default_factory=list)
    arrive: int = 0
    follow: int = 0
    consumed: list[tuple[int, int]] = field(default_factory=list)


class RunningBytes:
    """The bytes of stages of a line. `read` are the storages that W reads at each operation, and bytes of gradients."""

    def __init__(self, line: Line, stored: Stored, read: Sequence[tuple[frozenset[int], int]]) -> None:
        self._line, self._behind = line, stored.behind
        self._places = [_Place(left) for _, left in read]
        self._made = _makers(line, stored.behind)
        self._mark_kept(stored, [keys for keys, _ in read])
        for node, place in zip(line.nodes, self._places, strict=True):
            if node in line.inside:
                place.inside, place.fixed = list(line.inside[node].running), line.inside[node].fixed
            else:
                place.fixed = _fixed(node)
            place.collective = place.fixed > 0 and not is_random(node)
        self._mark_lives({key for _, key, _ in stored.kept})
        self._fixed = [0, *accumulate(place.fixed for place in self._places)]

    def _mark_kept(self, stored: Stored, read: Sequence[frozenset[int]]) -> None:
        weights: dict[int, list[int]] = defaultdict(list)
        for at, keys in enumerate(read):
            for key in keys:
                weights[key].append(at)
        before: dict[int, int] = {}
        for at, key, size in sorted(set(stored.kept)):
            weight = next((each for each in weights[key] if each >= at), NEVER)
            self._places[at].kept.append(_Kept(before.get(key, NOWHERE), self._made.get(key, NOWHERE), weight, size))
            before[key] = at

    def _mark_lives(self, kept: set[int]) -> None:
        sizes: dict[int, int] = {}
        trains: set[int] = set()
        last: dict[int, int] = {}
        for at, node in enumerate(self._line.nodes):
            sizes |= self._behind[node]
            trains |= self._behind[node].keys() if node.meta["differentiable"] else set()
            last |= {key: at for each in (node, *node.all_input_nodes) for key in self._behind.get(each, ())}
        for node in self._line.live[-1]:
            last |= dict.fromkeys(self._behind[node], NEVER)
        for key, at in self._on_line():
            self._places[at].made += sizes[key]
            if last[key] < NEVER:
                self._places[last[key]].ends.append((at, key in kept, sizes[key]))
            if key in trains:
                self._places[at].consumed.append((last[key], sizes[key]))
        self._mark_gradients(sizes, trains & self._made.keys(), last)

    def _on_line(self) -> list[tuple[int, int]]:
        return [(key, at) for key, at in self._made.items() if at >= 0]

    def _mark_gradients(self, sizes: Mapping[int, int], trains: Set[int], last: Mapping[int, int]) -> None:
        """A value that is used again later has a gradient already, to which another one is added. A sum makes none: it
        hands its own on."""
        for at, (node, place) in enumerate(zip(self._line.nodes, self._places, strict=True)):
            read = {key for each in node.all_input_nodes for key in self._behind.get(each, ())} & trains
            ending = sorted((key for key in read if last[key] == at), key=self._made.__getitem__)
            place.inside[1] += sum(sizes[key] for key in read.difference(ending))
            if node.target is torch.ops.aten.add.Tensor:
                place.follow = sum(sizes[key] for key in ending[:1])
                for key in ending[1:]:
                    if self._made[key] != ARRIVED:
                        self._places[self._made[key]].consumed.remove((at, sizes[key]))
            else:
                place.arrive = sum(sizes[key] for key in ending)

    def of(self, begin: int, end: int, kept: int, crossing: tuple[int, int], recompute: bool = False) -> Running:
        """Of the nodes from `begin` to `end`, of which autograd keeps so many bytes, with the bytes that cross the two
        cuts; with `recompute` only what arrives and what cannot be made again waits for B."""
        span, (arriving, leaving) = self._places[begin:end], crossing
        forward = arriving + _most_forward(span, begin, recompute)
        waiting, again = kept, 0
        if recompute:
            waiting = min(kept, arriving + self._fixed[end] - self._fixed[begin])
            again = arriving - sum(each.size for place in span for each in place.kept if _arrives(each, begin))
        backward, residue = _most_backward(span, begin, kept, leaving, recompute)
        return Running(waiting, residue, forward, backward + again)


def _fixed(node: Node) -> int:
    """What is kept though everything is recomputed that can be: of random numbers a mask of one byte each."""
    values = tensors_of(node.meta["val"])
    if can_remake(node) or is_under_way(node):
        return 0
    return storage_bytes(values) if node.meta["differentiable"] else is_random(node) * sum(t.numel() for t in values)


def _most_forward(span: Sequence[_Place], begin: int, recompute: bool) -> int:
    """The most that F makes."""
    most = now = 0
    for place in span:
        now += place.made
        if recompute:
            now += place.fixed
        else:
            now += sum(each.size for each in place.kept if each.made == NOWHERE and each.before < begin)
        most = max(most, now + place.inside[0])
        now -= sum(size for made, kept, size in place.ends if made >= begin and (recompute or not kept))
    return most


def _most_backward(span: Sequence[_Place], begin: int, kept: int, leaving: int, recompute: bool) -> tuple[int, int]:
    """The most that B holds, and what it leaves for W."""
    end, saved, most, gradients = begin + len(span), kept, 0, leaving
    unmade = _unmade(span, begin) if recompute else [0] * len(span)
    for place, less in zip(reversed(span), reversed(unmade), strict=True):
        gradients += place.arrive
        most = max(most, saved + gradients + place.inside[1] - less)
        gradients += place.follow - sum(size for last, size in place.consumed if last < end)
        saved += place.left - sum(each.size for each in place.kept if each.before < begin and each.weight >= end)
    return most, saved


def _unmade(span: Sequence[_Place], begin: int) -> list[int]:
    """By operation, what is not recomputed yet in its backward: what lies before the last collective, whose result was
    kept."""
    found, before, less = [], 0, 0
    for place in span:
        less = before if place.collective else less
        found.append(less)
        before += sum(k.size for k in place.kept if k.before < begin and not _arrives(k, begin))
        before -= place.fixed
    return found


def _arrives(kept: _Kept, begin: int) -> bool:
    """Whether it is kept for the first time by the stage, which did not make it."""
    return kept.before < begin and NOWHERE < kept.made < begin


def _makers(line: Line, behind: Mapping[Node, Mapping[int, int]]) -> dict[int, int]:
    """Where storages were made on the line."""
    found: dict[int, int] = {}
    for node, keys in behind.items():
        if node.op == "placeholder" and node.meta["slot"].kind == "activation":
            found |= dict.fromkeys(keys, ARRIVED)
    on_line = frozenset(line.nodes)
    elsewhere = {key for node, keys in behind.items() if node not in on_line for key in keys} - found.keys()
    for at, node in enumerate(line.nodes):
        for key in behind[node].keys() - elsewhere:
            found.setdefault(key, at)
    return found
