"""The memory of a step that is recorded as a whole (`cuda_graphs="step"`): where in one block of memory every value
of a rank lies, decided before the step.

The order of a rank's actions, the graphs of its passes and the ends of its sends say of every value when it is made and
when it is read for the last time. `live_values` follows the values through all actions, `lay_out` gives them places:
values that are alive at one moment do not overlap. So a step makes its values at the same addresses each time.

What stays from step to step has no place here: parameters, buffers, gradients, the batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.fx import Node

from zbcompile.errors import PipelineError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.graph.strides import is_dense
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import storage_key
from zbcompile.program.receive_buffers import AFTER
from zbcompile.runtime.rank_plan import Instruction
from zbcompile.runtime.stage_plan import arriving, leaving
from zbcompile.schedules.ir.actions import RECEIVES, SENDS, Action
from zbcompile.schedules.lowering.edges import Message

ENOUGH = 1.01  # of the least memory that a block can have
SMALL, SHORT = 1000, 10  # of that memory, and of the step, for a value: a thousandth, a tenth
LARGE = 100  # of that memory, for a value: a hundredth
TRIES = 16  # values to look at for each place
FULL = 0.95  # of that memory, at a moment
ALIGNMENT = 256  # of places: kernels choose by the alignment that they find, and torch's own memory has more


class Interval(NamedTuple):
    """The memory of a value: `size` bytes from the moment `first` to the moment `last`, both included."""

    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def most_alive(intervals: Iterable[Interval]) -> int:
    """The most bytes of aligned values that are alive at one moment: no block can be smaller."""
    changes = [(moment, size) for each in intervals for moment, size in _changes(each)]
    return max(accumulate(size for _, size in sorted(changes)), default=0)


def _changes(interval: Interval) -> tuple[tuple[int, int], tuple[int, int]]:
    size = aligned(interval.size)
    return (interval.first, size), (interval.last + 1, -size)


def lay_out(intervals: Sequence[Interval]) -> list[int]:
    """An offset for each value. Several ways are tried, until one needs hardly more than the least memory that a block
    can have; the best is taken.

    In the first ones each value in turn gets the first gap that it fits between those that are alive at the same time.
    The largest first (Pisarchyk and Lee 2020, "greedy by size") is best if many values have few sizes, as those of a
    transformer's layers. Large values that live shortly then keep others out of a region that stands empty at the
    fullest moment: so other turns have the fullest moments first, or what lives long. Then values are stacked in
    the order in which they are made; last, the large ones in a block as small as it can be, and the rest gets the gaps.
    """
    least, found = most_alive(intervals), list[int]()
    for offsets in _attempts(intervals):
        if not found or size_of(intervals, offsets) < size_of(intervals, found):
            found = offsets
        if size_of(intervals, found) <= least * ENOUGH:
            break
    return found


def _attempts(intervals: Sequence[Interval]) -> Iterator[list[int]]:
    alive, nowhere = _alive_together(intervals), [-1] * len(intervals)
    for turn in _turns(intervals):
        yield _first_fit(intervals, alive, turn, nowhere)
    for way in (_by_lines, _stacked):
        placed = way(intervals, most_alive(intervals))
        rest = sorted((i for i, offset in enumerate(placed) if offset < 0), key=lambda i: -intervals[i].size)
        yield _first_fit(intervals, alive, rest, placed)


def size_of(intervals: Sequence[Interval], offsets: Sequence[int]) -> int:
    """The bytes of a block in which values lie at these offsets."""
    return max((aligned(each.size) + offset for each, offset in zip(intervals, offsets, strict=True)), default=0)


def _turns(intervals: Sequence[Interval]) -> Iterator[list[int]]:
    numbers, least = range(len(intervals)), most_alive(intervals)
    fullest, moments = _fullest_moments(intervals), max((each.last for each in intervals), default=0)

    def by_size(i: int) -> tuple[int, int]:
        return -intervals[i].size, intervals[i].first

    def is_small(i: int) -> bool:  # fits anywhere, and comes last
        return intervals[i].size * SMALL < least

    def is_short(i: int) -> bool:
        return (intervals[i].last - intervals[i].first) * SHORT < moments

    yield sorted(numbers, key=by_size)
    yield sorted(numbers, key=lambda i: (is_small(i), -fullest[i], -intervals[i].last))
    full = FULL * least
    yield sorted(numbers, key=lambda i: (is_small(i), fullest[i] < full, -intervals[i].size, -intervals[i].last))
    yield sorted(numbers, key=lambda i: (is_small(i), is_short(i), *by_size(i)))


def _fullest_moments(intervals: Sequence[Interval]) -> list[int]:
    """For each value, the most bytes that are alive at any moment of its life."""
    changes = [0] * (max((each.last for each in intervals), default=0) + 2)
    for moment, size in (change for each in intervals for change in _changes(each)):
        changes[moment] += size
    alive = list(accumulate(changes))
    return [max(alive[each.first : each.last + 1]) for each in intervals]


def _alive_together(intervals: Sequence[Interval]) -> list[list[int]]:
    """For each value, those that share a moment with it."""
    found: list[list[int]] = [[] for _ in intervals]
    alive: list[int] = []
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        alive = [i for i in alive if intervals[i].last >= intervals[index].first]
        for other in alive:
            found[other].append(index)
        found[index] = list(alive)
        alive.append(index)
    return found


def _first_fit(
    intervals: Sequence[Interval], alive: Sequence[Sequence[int]], turn: Iterable[int], placed_before: Sequence[int]
) -> list[int]:
    """Places for those in `turn`, which have none in `placed_before`: there they are -1."""
    offsets = list(placed_before)
    for index in turn:
        placed = sorted((offsets[i], offsets[i] + aligned(intervals[i].size)) for i in alive[index] if offsets[i] >= 0)
        offsets[index] = _first_gap(placed, aligned(intervals[index].size))
    return offsets


def _first_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Where `size` bytes fit between ranges that begin in this order."""
    end = 0
    for low, high in taken:
        if low - end >= size:
            break
        end = max(end, high)
    return end


def _by_lines(intervals: Sequence[Interval], least: int) -> list[int]:
    """Offsets of all but the small values: on the lowest of the lines that bound what lies there, over time, the value
    is placed next that is made first, of these the one that lives longest (a skyline; Sekiyama et al. 2018 take the
    one that lives longest of all)."""
    offsets = [-1] * len(intervals)
    large = [i for i, each in enumerate(intervals) if each.size and each.size * SMALL >= least]
    waiting = sorted(large, key=lambda i: (intervals[i].first, -intervals[i].last))
    lines = [(0, max((intervals[i].last + 1 for i in large), default=0), 0)]  # from, to, at which height
    while waiting:
        at = min(range(len(lines)), key=lambda number: lines[number][2])
        begin, end, height = lines[at]
        fits = (n for n, i in enumerate(waiting) if begin <= intervals[i].first and intervals[i].last < end)
        number = next(fits, -1)
        if number < 0:
            neighbours = [lines[n][2] for n in (at - 1, at + 1) if 0 <= n < len(lines)]
            new = [(begin, end, min(neighbours))]
        else:
            index = waiting.pop(number)
            offsets[index] = height
            size, first, last = aligned(intervals[index].size), intervals[index].first, intervals[index].last + 1
            new = [(begin, first, height), (first, last, height + size), (last, end, height)]
        lines = _joined([*lines[:at], *new, *lines[at + 1 :]])
    return offsets


def _joined(lines: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Lines without empty ones, neighbours of one height as one."""
    found: list[tuple[int, int, int]] = []
    for begin, end, height in lines:
        if begin == end:
            continue
        if found and found[-1][2] == height:
            begin = found.pop()[0]
        found.append((begin, end, height))
    return found


def _stacked(intervals: Sequence[Interval], least: int) -> list[int]:
    """Offsets of the large values, on top of each other; -1 for the others."""
    large = [i for i, each in enumerate(intervals) if each.size and each.size * LARGE >= least]
    found = dict(zip(large, _Stack([intervals[i] for i in large]).offsets_of_all(), strict=True))
    return [found.get(i, -1) for i in range(len(intervals))]


class _Stack:
    """The rule of MiniMalloc (Moffitt 2023) without its way back: of those that can lie lowest, on what lies there
    already, the next is the one whose moments are fullest, then the one that lives longest. It waits if it would leave
    others without room: at each moment, the lowest place of any that wait plus the bytes of all that wait may not
    exceed the most that are alive. After `TRIES` that would, the first of them is placed all the same.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        begins, numbers = sorted({each.first for each in intervals}), range(len(intervals))
        self.sizes, self.alive = [aligned(each.size) for each in intervals], _alive_together(intervals)
        self.lives = [range(bisect_left(begins, each.first), bisect_right(begins, each.last)) for each in intervals]
        self.waiting: list[set[int]] = [set() for _ in begins]
        for i, moment in ((each, moment) for each in numbers for moment in self.lives[each]):
            self.waiting[moment].add(i)
        self.bytes = [sum(self.sizes[i] for i in waiting) for waiting in self.waiting]  # that wait at a moment
        self.limit = max(self.bytes, default=0)
        self.lowest = [0] * len(intervals)  # place that a value can have
        self.floors = [0] * len(begins)  # at each moment, the lowest of any that wait
        fullest = [max(self.bytes[moment] for moment in life) for life in self.lives]
        self.turns = sorted(numbers, key=lambda i: (-fullest[i], -len(self.lives[i]), i))

    def offsets_of_all(self) -> list[int]:
        while self.turns:
            tried = nsmallest(TRIES, self.turns, key=self.lowest.__getitem__)
            self._place(next(filter(self._leaves_room, tried), tried[0]))
        return self.lowest

    def _leaves_room(self, index: int) -> bool:
        def after(moment: int) -> int:
            return self.bytes[moment] - (self.sizes[index] if index in self.waiting[moment] else 0)

        return all(floor + after(moment) <= self.limit for moment, floor in self._floors_on(index).items())

    def _raised(self, index: int) -> set[int]:
        """The values that have to lie on this one, once it has its lowest place."""
        top = self.lowest[index] + self.sizes[index]
        return {i for i in self.alive[index] if self.lowest[i] < top and i in self.waiting[self.lives[i].start]}

    def _floors_on(self, index: int) -> dict[int, int]:
        """The lowest place of any that wait, at the moments at which it may be another once `index` has its own."""
        top, raised = self.lowest[index] + self.sizes[index], self._raised(index)
        higher = {moment for i in raised for moment in self.lives[i] if self.lowest[i] <= self.floors[moment]}
        return {
            moment: min((top if i in raised else self.lowest[i] for i in self.waiting[moment] if i != index), default=0)
            for moment in higher.union(self.lives[index])
        }

    def _place(self, index: int) -> None:
        floors, raised = self._floors_on(index), self._raised(index)
        for moment, floor in floors.items():
            self.floors[moment] = floor
        for i in raised:
            self.lowest[i] = self.lowest[index] + self.sizes[index]
        for moment in self.lives[index]:
            self.waiting[moment].remove(index)
            self.bytes[moment] -= self.sizes[index]
        self.turns.remove(index)


@dataclass(frozen=True)
class MemoryPlan:
    """Where the values of a rank lie in a block of `size` bytes, of which `least` are alive at one moment.

    `results[action]` has, by the name of an operation of the action's graph, the offset of each tensor that it makes,
    None for one that lies in memory that was there; `received` the offsets of what a RECV posts.
    """

    size: int
    least: int
    results: Mapping[Action, Mapping[str, tuple[int | None, ...]]]
    received: Mapping[Action, tuple[int, ...]]


def plan_memory(
    instructions: Iterable[Sequence[Instruction]], program_of: Callable[[Action], StageProgram], shared: Set[str]
) -> MemoryPlan:
    """Places for all that the instructions of a rank make. `program_of` has the stage that an action runs, `shared`
    the parameters whose gradients wait for other stages."""
    values = _ValuePlaces(program_of, shared)
    for (instruction,) in instructions:  # halves of a pair do not run together at fixed places
        values.follow(instruction)
    values.end()
    found = [Interval(*each) for each in values.spans]
    offsets = lay_out(found)

    def places(of: Iterable[int | None]) -> tuple[int | None, ...]:
        return tuple(None if value is None else offsets[value] for value in of)

    return MemoryPlan(
        size=size_of(found, offsets),
        least=most_alive(found),
        results={action: {n: places(of) for n, of in made.items()} for action, made in values.results.items()},
        received={action: tuple(offsets[value] for value in of) for action, of in values.received.items()},
    )


Span = list[int]  # of a value: its bytes, and the moments in which it is made and read last
Held = int | None  # the number of a value, None for one that stays from step to step


class _ValuePlaces:
    """Follows the values of a rank through its actions. Each operation is a moment, and so is what is around them."""

    def __init__(self, program_of: Callable[[Action], StageProgram], shared: Set[str]) -> None:
        self.program_of, self.shared = program_of, shared
        self.moment = 0
        self.spans: list[Span] = []
        self.results: dict[Action, dict[str, tuple[Held, ...]]] = {}
        self.received: dict[Action, tuple[int, ...]] = {}
        self.frames: dict[tuple[int, int], dict[Slot, Held]] = {}
        self.mail: dict[Message, list[Held]] = {}  # made or received, and not yet used
        self.sent: dict[Message, list[Held]] = {}
        self.staying: list[Held] = []  # until the end of the step

    def follow(self, instruction: Instruction) -> None:
        for message in instruction.completes:
            self._read(self.sent.pop(message))
        self.moment += 1
        action, carries = instruction.action, instruction.carries
        if action.op in RECEIVES and carries is not None:
            self.received[action] = tuple(self._make(spec.bytes) for spec, _ in instruction.buffers)
            self.mail[carries] = list(self.received[action])
        elif action.op in SENDS and carries is not None:
            self.sent[carries] = self.mail.pop(carries)
        elif action.op in AFTER:
            self._run(instruction)
        self.moment += 1

    def end(self) -> None:
        for values in (self.staying, *self.sent.values()):
            self._read(values)

    def _make(self, size: int) -> int:
        self.spans.append([size, self.moment, self.moment])
        return len(self.spans) - 1

    def _read(self, values: Iterable[Held]) -> None:
        for value in values:
            if value is not None:
                self.spans[value][2] = self.moment

    def _run(self, instruction: Instruction) -> None:
        action = instruction.action
        program = self.program_of(action)
        piece, frame = program.pieces[action.op], self.frames.setdefault(action[1:], {})
        if instruction.needs:
            arrived = [value for message in instruction.needs for value in self.mail.pop(message)]
            self._read(arrived)  # generator state, which is last, is used up here
            frame |= dict(zip(arriving(program, action.op), arrived, strict=False))
        held = {key: frame.get(slot) for slot, node in _holders(piece) for key in _storages(node)}
        held |= {key: None for node in piece.module.graph.find_nodes(op="get_attr") for key in _storages(node)}
        self.results[action] = {node.name: made for node in _operations(piece) if (made := self._operation(node, held))}
        self.moment += 1
        self._keep(instruction, piece, program, held)

    def _operation(self, node: Node, held: dict[int, Held]) -> tuple[Held, ...]:
        """The numbers of the values that an operation makes, empty if it makes none."""
        self.moment += 1
        self._read(held[key] for each in node.all_input_nodes for key in _storages(each))
        new = [None if storage_key(t) in held else self._make(t.untyped_storage().nbytes()) for t in _tensors(node)]
        held |= {storage_key(t): value for t, value in zip(_tensors(node), new, strict=True) if value is not None}
        return tuple(new) if any(value is not None for value in new) else ()

    def _keep(self, instruction: Instruction, piece: Piece, program: StageProgram, held: Mapping[int, Held]) -> None:
        """What later passes and other stages read of the results."""
        _, stage, microbatch = instruction.action
        results = dict(zip(piece.outputs, output_values(piece.module.graph), strict=True))
        found = {slot: held[key] for slot, node in results.items() for key in _storages(node)}
        self._read(found.values())
        self.staying += [value for slot, value in found.items() if self._stays(slot)]
        frame = self.frames.pop((stage, microbatch))
        if piece.name in ("F", "B") and len(program.pieces) > 1:
            self.frames[stage, microbatch] = frame | {slot: v for slot, v in found.items() if slot.kind == "saved"}
        if instruction.makes:
            sends = leaving(program, piece.name)
            for slot, spec in sends.items():
                _require_layout(slot, spec, results[slot], stage)
            made = [found[slot] for slot in sends]
            self.mail |= {message: made[part or slice(None)] for message, _, part in instruction.makes}

    def _stays(self, slot: Slot) -> bool:
        return slot.kind in ("loss", "output") or (slot.kind == "gradient" and slot.name in self.shared)


def _require_layout(slot: Slot, spec: TensorSpec, node: Node, stage: int) -> None:
    """Raise PipelineError if what is sent is a copy, for which a plan has no place."""
    value = node.meta["val"]
    meaningful = [(a, b) for a, b, size in zip(value.stride(), spec.stride, value.shape, strict=True) if size != 1]
    if value.shape != spec.shape or any(a != b for a, b in meaningful) or not is_dense(value):
        raise PipelineError(
            f"stage {stage} sends {slot.name} with strides {value.stride()}, which travels as {spec.stride}: a copy, "
            "for which a memory plan has no place. Make it contiguous in forward, or use cuda_graphs=True."
        )


def _holders(piece: Piece) -> Iterable[tuple[Slot, Node]]:
    return zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)


def _operations(piece: Piece) -> Iterable[Node]:
    return (node for node in piece.module.graph.nodes if node.op == "call_function")


def _tensors(node: Node) -> list[torch.Tensor]:
    return tensors_of(node.meta.get("val"))


def _storages(node: Node) -> list[int]:
    return [storage_key(tensor) for tensor in _tensors(node)]
