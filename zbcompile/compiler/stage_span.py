"""What a stage keeps, repeats and holds while it runs, for any two cuts: by the prices of the blocks of a line.

A stage that remakes what its blocks receive keeps what it received or, if that takes no more bytes, what its first
operations make of it: as in the stage itself a minimum cut says which.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from zbcompile.compiler.block_memory import BlockMemory, Part
from zbcompile.compiler.block_prices import Prices
from zbcompile.passes.compile_options import Choices, Policy
from zbcompile.passes.graph.rematerialize import can_remake
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.graph.strides import boundary_like
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.memory_estimate import DistinctBytes
from zbcompile.passes.recompute.budget import Values, smallest
from zbcompile.passes.recompute.candidates import ATTOSECONDS, is_hinted
from zbcompile.passes.torch_private import storage_key

Sizes = dict[Hashable, int]  # bytes of storages


class PolicyPrices(NamedTuple):
    """The prices of a line under one policy of recomputing, and its distinct bytes that wait for B (`kept`), for B once
    everything that blocks receive is remade (`held`), and for W (`residue`); `waiting` is what waits for B, by the
    operation that reads it."""

    prices: Prices
    kept: DistinctBytes
    held: DistinctBytes
    residue: DistinctBytes
    waiting: Mapping[int, Sizes]

    @classmethod
    def of(cls, prices: Prices, length: int) -> "PolicyPrices":
        """Of a line with `length` operations. What only one block knows is called by the operation that reads it and
        its size: so it has one name under all policies."""
        kept, held, residue = (DistinctBytes(each, length) for each in (prices.kept, prices.held, prices.residue))
        waiting: dict[int, Sizes] = {}
        for place, which, size in prices.kept:
            here = waiting.setdefault(place, {})
            here[(place, size, len(here)) if isinstance(which, tuple) else which] = size
        return cls(prices, kept, held, residue, waiting)


class StageStart(NamedTuple):
    """How a stage begins that remakes what its blocks receive: the storages of its operations before `stop` that it
    `kept` for this, with their bytes, where the last of those operations reads each that they make (`read`), and those
    that run `again`. All that crosses the edge `made` is kept, if the stage does not begin there."""

    kept: Mapping[Hashable, int]
    read: Mapping[Hashable, int]
    again: Sequence[int]
    stop: int
    made: int


@dataclass(eq=False)
class StageSpan:
    """The operations of a line from `begin` to `end` as a stage; `places` are all by node. `known` are the prices under
    its policy, `off` those without recomputation; `starts` remembers how stages begin."""

    line: Line
    places: Mapping[Node, int]
    begin: int
    end: int
    known: PolicyPrices
    off: PolicyPrices
    policy: Policy
    choices: Choices
    starts: dict[tuple[Any, ...], StageStart]

    def __post_init__(self) -> None:
        prices, kept, held, residue, _ = self.known
        begin, end, self._edges = self.begin, self.end, [*prices.blocks, len(self.line.nodes)]
        self.start, edges = StageStart({}, {}, (), begin, begin), self._edges[bisect_right(self._edges, begin) :]
        if self.policy in ("full", "hints"):  # of its first two blocks, or of the whole if it has no more
            stop = min(end, *edges[:2][-1:])
            key = self.policy, begin, stop, stop < end and prices.blocks[stop] > 0
            self.start = self.starts.get(key) or self.starts.setdefault(key, self._find_start(*key[2:]))
        made = self.start.made
        self._arriving = sizes_of(self._live(begin))
        self._sent = [*self._live(end)]
        self._grown, self._left = kept.growing(begin, end), residue.shrinking(begin, end)
        unmade = kept.within(begin, made)  # of what runs again only when nothing but its own B is left
        self._waits = held.growing(begin, made) + [unmade + size for size in held.growing(made, end)]
        viewed = prices.viewed | self.off.prices.viewed
        wanted = self.start.kept or {w: size for w, size in self._arriving.items() if kept.uses(w, begin, end)}
        self._arrived = 0  # of gradients that wait for W
        self._staying = {w: size for w, size in wanted.items() if w in self._arriving and w not in viewed}

    def again(self) -> list[tuple[int, float]]:
        """The operations that B repeats, with their seconds: of blocks before one that receives what is remade also
        those that only lead to it."""
        prices, start = self.known.prices, self.start
        behind = (block for block, size in prices.blocks.items() if start.stop <= block < self.end and size)
        last = max(behind, default=start.stop)
        found = [(place, prices.passing[place]) for place in (*start.again, *range(start.stop, last))]
        for first, memory, part in self._parts(last):
            found += [(first + place, seconds) for place, seconds in memory.again(part.begin, part.end)]
        return found

    def running(self) -> tuple[int, ...]:
        """The most bytes that are alive while F and while B run: at any operation what waits for those up to it, what
        those behind it have left, what crosses the cuts, and what else is alive."""
        found = [most for each in self._parts(self.begin) for most in self._most(*each)]
        return tuple(map(max, zip((0, 0), *found, strict=True)))

    def _find_start(self, stop: int, more: bool) -> StageStart:
        values, free = self._values(stop, more)
        found = smallest(values)
        kept = {key: values.bytes[key] for key in found.kept if values.bytes[key]}
        edges = (edge for edge in self._edges if self.begin < edge <= stop and self._live(edge))
        made = next((edge for edge in edges if sizes_of(self._live(edge)).keys() - free <= kept.keys()), self.begin)
        read = {
            key: place
            for place in range(self.begin, stop)
            for key in sizes_of(self.line.nodes[place].all_input_nodes)
            if key in kept and values.inputs[key]
        }
        return StageStart(kept, read, [at for at in range(self.begin, stop) if ("run", at) in found.remade], stop, made)

    def _values(self, stop: int, more: bool) -> tuple[Values, Set[Hashable]]:
        """What there is to keep or to remake up to `stop`, and to have there if the stage has `more`: storages, and
        the runs of operations, which make some of what they read; and the storages that are kept anyway."""
        sizes = sizes_of(self._live(self.begin))
        inputs: dict[Hashable, tuple[Hashable, ...]] = dict.fromkeys(sizes, ())
        times, wanted, free = dict[Hashable, int](), set[Hashable](), set[Hashable]()
        for place in range(self.begin, stop):
            node, seconds, run = self.line.nodes[place], self.known.prices.passing[place], ("run", place)
            can = can_remake(node) and (self.policy == "full" or is_hinted(node))
            read = [key for key in sizes_of(node.all_input_nodes) if key in inputs]
            inputs[run] = tuple(key for key in read if can or key in times or not inputs[key])  # no empty buffers
            if can or seconds:
                times[run] = int(ATTOSECONDS * seconds)
            waiting = self.off.waiting.get(place, {})
            of_block = {key: size for key, size in waiting.items() if isinstance(key, tuple)}
            for key, size in (sizes_of([node]) | of_block).items():
                if key not in inputs:
                    inputs[key], sizes[key] = (run,), size
                    times |= {key: 0} if run in times else {}
            wanted |= waiting.keys() & inputs.keys()  # every stage computes others for itself
            free |= self.known.waiting.get(place, {}).keys()
        leaving = (value for value in self._live(stop) if more and (self.policy == "full" or is_hinted(value)))
        wanted |= sizes_of(leaving).keys() & inputs.keys()
        return Values(frozenset(wanted), inputs, sizes | dict.fromkeys(free & sizes.keys(), 0), times), free

    def _parts(self, begin: int) -> Iterator[tuple[int, BlockMemory, Part]]:
        """The parts of blocks from an operation on, from the last one to the first."""
        for first, memory in reversed(self.known.prices.memory.items()):
            ends = first <= begin, self.end <= first + memory.length, first == self.start.made > self.begin
            part = Part(max(0, begin - first), min(self.end - first, memory.length), *ends)
            if part.begin < part.end:
                yield first, memory, part

    def _most(self, first: int, memory: BlockMemory, part: Part) -> Iterator[tuple[int, int]]:
        """The most bytes that are alive at each operation of a part, while F and while B run."""
        begin, end = first + part.begin, first + part.end
        over = {*self._live(begin)} & {*self._live(end)}
        late = self.begin < self.start.made <= begin
        crossing = {**self._arriving, **sizes_of(over), **(self.start.kept if late else {})}
        counted = self.known.prices.received[first] if part.begin == 0 else frozenset()  # by the block
        values = {which: size for which, size in crossing.items() if which not in counted}
        gradients = gradients_of(over - {*self._live(self.end)})
        if not part.last:  # of the gradients that arrived some are among what was left
            gradients += gradients_of(self._sent) - self._arrived
        else:  # the block counts them at its end
            self._arrived = memory.arrived_for_weights(part)
            gradients += gradients_of(self._sent) * (part.end < memory.length)
        beside = zip(memory.beside("F", part), memory.beside("B", part), strict=True)
        for at, (in_forward, in_backward) in enumerate(beside, begin):
            forward = self._in_forward(at, values, late) + in_forward if in_forward is not None else 0
            backward = self._in_backward(at, values, late) + gradients + in_backward if in_backward is not None else 0
            yield forward, backward

    def _in_forward(self, at: int, values: Mapping[Hashable, int], late: bool) -> int:
        """What is alive at an operation of F, but for what its block counts."""
        kept, start = self.known.kept, self.start
        found = self._grown[at - self.begin] + (copied_of(self._sent, self.choices.exact) if at == self.end - 1 else 0)
        found += sum(size for which, size in values.items() if not kept.uses(which, self.begin, at + 1))
        return found if late else found + sum(start.kept[which] for which, last in start.read.items() if last < at)

    def _in_backward(self, at: int, values: Mapping[Hashable, int], late: bool) -> int:
        """What is alive at an operation of B, but for gradients and for what its block counts."""
        since, staying = (self.start.made, self.start.kept) if late else (self.begin, self._staying)
        found = self._waits[at - self.begin] + self._left[at - self.begin]
        for which, size in values.items():
            before = self.known.held.uses(which, since, at + 1)
            later = self.known.residue.uses(which, at + 1, self.end)
            found += staying.get(which, 0) * (not before and not later) - size * (before and later)
        return found

    def _live(self, edge: int) -> tuple[Node, ...]:
        return self.line.live[edge - 1] if 0 < edge < len(self.line.nodes) else ()


def sizes_of(values: Iterable[Node]) -> Sizes:
    """The storages behind some values, with their bytes."""
    tensors = (tensor for node in values for tensor in tensors_of(node.meta["val"]))
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def gradients_of(values: Iterable[Node]) -> int:
    """Bytes of the gradients of some values: each has its own."""
    return sum(t.nbytes for node in values if node.meta["differentiable"] for t in tensors_of(node.meta["val"]))


def copied_of(values: Iterable[Node], exact: bool) -> int:
    """Bytes of what leaves in other strides than it is made in."""
    tensors = [tensor for value in values for tensor in tensors_of(value.meta["val"])]
    return sum(t.nbytes for t in tensors if boundary_like(t, exact).stride() != t.stride())
