"""What a line of operations costs, from the graphs of its distinct blocks.

A model has few distinct blocks. Each is compiled once as a stage of its own, for each way to recompute, on fake tensors
and without a backend. Every operation of its F, B and W knows the operation of the model that it belongs to, and so
does what waits between them. So the costs of the graphs belong to operations of the line: a cut may divide a block, and
the shares add up to it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from zbcompile.compiler.block_memory import BlockMemory, Step, Use
from zbcompile.compiler.compile_stage import compile_stage, labels_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.opaque_calls import form_of, is_call
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.rematerialize import can_remake
from zbcompile.passes.graph.storage import is_view, storages_behind, tensors_of
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.machine.roofline import joined_seconds, kernel_seconds
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.node_costs import device_of
from zbcompile.passes.partition.search import Cuts
from zbcompile.passes.partition.stage_graphs import Stage, assign_by_cuts, cut
from zbcompile.passes.recompute.candidates import is_hinted
from zbcompile.passes.split.joint_graph import gradients_before, tangents_of
from zbcompile.passes.split.saved_bytes import LOSS
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.deduplicate import Tangents, same_work
from zbcompile.passes.stage.stage_program import Collective, StageProgram, collectives_of
from zbcompile.passes.torch_private import set_stack_trace, stack_trace, storage_key

LEAST, MOST = 6, 120  # operations of a block
WAITING = ("saved", "activation", "tangent")  # kinds of slots


@dataclass
class Prices:
    """The prices of a block or line, by operation.

    * Seconds: `seconds` of its F, B and W; `exchange`: of F's and B's those in which they wait for exchanges that a W
      can hide; `saved` by a BW, which does once what B and W both do; `passing` of what B recomputes on the way to
      later blocks.
    * Storages: `kept` waits for B, `residue` for W; `held` waits for B once all is remade that blocks receive from
      others.
    * `blocks` are the first operations of the blocks, each with the bytes of what the block received that a stage
      keeps if it begins there, and remakes otherwise; `memory` is what is alive while they run, `received` the storages
      that they receive, `viewed` those that wait for B as nothing but views.
    """

    seconds: tuple[list[float], ...]
    exchange: tuple[list[float], ...]
    saved: list[float]
    passing: list[float]
    kept: list[Use]
    held: list[Use]
    residue: list[Use]
    blocks: dict[int, int]
    memory: dict[int, BlockMemory]
    received: dict[int, frozenset[Hashable]]
    viewed: set[Hashable]


Made = dict[str, tuple[Prices, list[torch.Tensor | None]]]


def blocks_of(line: Line) -> list[int]:
    """Where to divide the line into blocks, as numbers of nodes before: where least crosses."""
    width = {i + 1: line.boundary_bytes(i) for i, allowed in enumerate(line.allowed[:-1]) if allowed}
    edges: list[int] = []
    for most in sorted(set(width.values())):
        edges = [edge for edge, size in width.items() if size <= most]
        if max(b - a for a, b in pairwise([0, *edges, len(line.nodes)])) <= MOST:
            break
    found = [0]
    for edge in edges:
        if edge - found[-1] >= LEAST:
            found.append(edge)
    return found


def price_line(
    canonical: Canonical,
    line: Line,
    choices: Choices,
    behind: Tangents | None,
    made: Made,
    base: Prices | None = None,
    fused: bool = False,
) -> Prices:
    """The prices of all operations of a line, for one policy of recomputing.

    `behind` are the gradients that arrive at its end, None if it makes the loss; `made` remembers blocks. `base`, for
    a policy that recomputes everything, are the prices without: by what waits there its B is measured, which holds all
    of it once it is recomputed. `fused`: see `seconds_of`.
    """
    begins = blocks_of(line)
    cuts = Cuts(tuple(begin - 1 for begin in begins[1:]), (), "", "", (), (), ())
    stages = cut(canonical, line, assign_by_cuts(line, cuts), len(begins), choices.exact)
    trainable, labels = canonical.captured.trainable, labels_of(canonical)
    choices = replace(choices, hardware=choices.hardware or hardware_for(device_of(line)))
    found: list[tuple[Stage, Prices]] = []
    gradients = behind
    with torch.autocast(device_of(line), enabled=False):
        for stage, (begin, end) in zip(stages[::-1], list(pairwise([*begins, len(line.nodes)]))[::-1], strict=True):
            tangents = tangents_of(stage, gradients)
            remade = _remade(stage, line, choices)
            key = f"{choices.recompute} {sorted(remade)} {_work(stage, trainable, tangents)}"
            if key not in made:
                places = _mark(stage, line, begin)
                program, leaving = compile_stage(trainable, choices, stage, tangents, labels=labels)
                below = None if base is None else base.memory[begin].kept
                block = _Block(stage, program, places, end - begin, choices, fused)
                made[key] = block.priced(remade, below), [leaving.get(name) for name in _received(stage)]
            prices, order = made[key]
            leaving = {n: g for n, g in zip(_received(stage), order, strict=True) if g is not None}
            gradients = gradients_before(stage, gradients, leaving)
            found.append((stage, prices))
    joined = _joined(canonical, found[::-1])
    return joined if base is None else replace(joined, held=base.kept)


def _work(stage: Stage, trainable: frozenset[str], tangents: Tangents) -> str:
    """`same_work`, in which calls that are operators are equal if they cost alike: those of parallelised layers do."""
    found = same_work(stage, trainable, tangents)
    for node in filter(is_call, stage.module.graph.nodes):
        found = found.replace(repr(node.args[1]), str(form_of(node)))
    return found


def _received(stage: Stage) -> list[str]:
    return [slot.name for slot in stage.inputs if slot.kind == "activation"]


def _remade(stage: Stage, line: Line, choices: Choices) -> frozenset[int]:
    """Which of the values that a block receives are remade, unless a stage begins with it: with "full" all, with
    "hints" those made in a marked region. A price of a byte is asked in every block for itself."""
    made = {node.name: node for node in line.nodes}
    found = frozenset(range(len(_received(stage))))
    if choices.recompute == "full":
        return found
    marked = [name in made and is_hinted(made[name]) and can_remake(made[name]) for name in _received(stage)]
    return frozenset(number for number in found if marked[number]) if choices.recompute == "hints" else frozenset()


def _sent(stage: Stage) -> list[str]:
    return [slot.name for slot in stage.outputs if slot.kind == "activation"]


def _mark(stage: Stage, line: Line, first: int) -> list[tuple[int, bool]]:
    """Number the nodes of a stage's graph, so that what is traced of them says which they are; returns the place of
    each in the block, and whether the stage computes it for itself: then it is where it is read first."""
    position = {node.name: at - first for at, node in enumerate(line.nodes)}
    nodes = list(stage.module.graph.nodes)
    places = [position.get(node.name, -1) if node.op == "call_function" else -1 for node in nodes]
    own = [place < 0 and node.op == "call_function" for place, node in zip(places, nodes, strict=True)]
    number = {node: i for i, node in enumerate(nodes)}
    for i in reversed(range(len(nodes))):
        if places[i] < 0 and nodes[i].users:
            places[i] = min(places[number[user]] for user in nodes[i].users)
        set_stack_trace(nodes[i], str(i))
        own[i] = own[i] and any(user.op != "output" for user in nodes[i].users)
    return [*zip((max(0, place) for place in places), own, strict=True)]


class _Block:
    """The prices of one block. `places` are those of the nodes of its stage's graph, by the numbers that they have."""

    def __init__(
        self,
        stage: Stage,
        program: StageProgram,
        places: Sequence[tuple[int, bool]],
        length: int,
        choices: Choices,
        fused: bool,
    ) -> None:
        self.stage, self.program, self.places, self.length = stage, program, places, length
        self.choices = choices
        self.own = set[Node]()
        self.kernels = {
            op: [*kernel_seconds(piece.module, self._hardware, fused)] for op, piece in program.pieces.items()
        }
        self.at = {op: self._places_in(piece) for op, piece in program.pieces.items()}
        holders = [n for piece in program.pieces.values() for n in piece.module.graph.find_nodes(op="placeholder")]
        self.resident = storages_behind(n for n in holders if n.meta["slot"].kind not in WAITING)
        self.names = dict(self._storages())

    def priced(self, remade: frozenset[int], below: Sequence[Use] | None) -> Prices:
        before = self._uses("B", made_before=True) | self._uses("W", made_before=True)
        held = [(*use, size) for use, size in before.items()]
        residue = [(*use, size) for use, size in self._uses("W").items()]
        again = {("received", number) for number in remade}  # in later blocks of a stage
        received = sum({which: size for _, which, size in held if which in again}.values())
        kept = [use for use in held if use[1] not in again]
        found = Prices(
            tuple([0.0] * self.length for _ in "FBW"),
            tuple([0.0] * self.length for _ in "FB"),
            [0.0] * self.length,
            [0.0] * self.length,
            kept,  # type: ignore[arg-type]
            held,  # type: ignore[arg-type]
            residue,  # type: ignore[arg-type]
            {0: received},
            {0: self._memory(kept, residue, kept if below is None else below)},
            {},
            self._viewed(),
        )
        for op, times in zip("FBW", found.seconds, strict=True):
            self._add_seconds(op, times, found)
            self._add_exchanges(op, times, found)
        for nodes, seconds in self.kernels["BW"]:
            found.saved[self.at["BW"][nodes[0]]] -= seconds
        return found

    def _places_in(self, piece: Piece) -> dict[Node, int]:
        """The place of each operation; what autograd adds of its own belongs to what it ran before."""
        found: dict[Node, int] = {}
        last = 0 if piece.name == "F" else self.length - 1
        for node in piece.module.graph.nodes:
            if node.op == "call_function":
                mark = stack_trace(node)
                found[node] = self.places[int(mark)][0] if mark.isdecimal() else last
                again = _is_repeated(node)
                if mark.isdecimal() and self.places[int(mark)][1] and (again or piece.name == "F"):
                    self.own.add(node)
                last = last if again else found[node]
        return found

    @property
    def _hardware(self) -> Hardware:
        assert self.choices.hardware is not None, "set in price_line"
        return self.choices.hardware

    def _add_seconds(self, op: str, times: list[float], found: Prices) -> None:
        for nodes, seconds in self.kernels[op]:
            place = self.at[op][nodes[0]]
            times[place] += 0 if op == "B" and _is_repeated(nodes[0]) else seconds
            if op != "F":
                found.saved[place] += seconds
            elif remade := [node for node in nodes if self._passes(node)]:
                whole = len(remade) == len(nodes)
                found.passing[place] += seconds if whole else joined_seconds(remade, self._hardware)

    def _add_exchanges(self, op: str, times: list[float], found: Prices) -> None:
        named = {node.name: place for node, place in self.at[op].items()}
        for each in collectives_of(self.program):
            if each.name == op:
                place, seconds = named[each.operation], exchange_seconds(each, self.choices, "")
                times[place] += seconds
                if each.hides and op in "FB":
                    found.exchange["FB".index(op)][place] += seconds

    def _passes(self, node: Node) -> bool:
        """Whether an operation runs again on the way to a later block: not the mask of a dropout."""
        return can_remake(node) and (self.choices.recompute == "full" or is_hinted(node))

    def _storages(self) -> Iterator[tuple[int, tuple[str, int]]]:
        """The storages that other blocks may know as well: the results of the model's operations, what this block
        receives and what it sends."""
        values = [node.meta.get("val") for node in self.stage.module.graph.nodes]
        made: dict[int, Node] = {}  # of several operations that one of the model consists of the last with its result
        for node in self.program.pieces["F"].module.graph.nodes:
            mark = stack_trace(node) if node.op == "call_function" else ""
            if mark.isdecimal() and _alike(node.meta.get("val"), values[int(mark)]):
                made[int(mark)] = node
        for number, node in made.items():
            yield from ((key, ("own", number)) for key in storages_behind([node]))
        received, sent = ({name: i for i, name in enumerate(of(self.stage))} for of in (_received, _sent))
        for op in "WBF":
            piece = self.program.pieces[op]
            outputs = zip(piece.outputs, output_values(piece.module.graph), strict=True)
            holders = zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)
            for names, pairs, kinds in (
                (sent, outputs, {"activation": "sent"}),
                (received, holders, {"activation": "received"}),
            ):
                for slot, node in pairs:
                    if slot.kind in kinds and slot.name in names:
                        yield from ((key, (kinds[slot.kind], names[slot.name])) for key in storages_behind([node]))

    def _uses(self, op: str, made_before: bool = False) -> dict[tuple[int, Any], int]:
        """Bytes that wait for a pass, by the place and the storage at which it reads them; `made_before`: only of what
        waits for B as well, so no gradients."""
        piece, found = self.program.pieces[op], dict[tuple[int, Any], int]()
        backward = self.program.pieces["B"].module.graph
        made = storages_behind(n for n in backward.nodes if n.op == "call_function")
        arrives = storages_behind(n for n in backward.find_nodes(op="placeholder") if n.meta["slot"].kind != "tangent")
        for node, slot in zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True):
            if slot.kind not in WAITING or (slot.kind == "tangent" and (made_before or slot.name == "loss")):
                continue
            readers = {self.at[op][user] for user in node.users if user in self.at[op]} or {self.length - 1}
            for tensor in tensors_of(node.meta["val"]):
                key = storage_key(tensor)
                if key not in self.resident and not (made_before and key in made - arrives):
                    uses = ((place, self._which(tensor)) for place in readers)
                    found |= dict.fromkeys(uses, tensor.untyped_storage().nbytes())
        return found

    def _memory(self, kept: Sequence[Any], residue: Sequence[Any], held: Sequence[Any]) -> BlockMemory:
        pieces = self.program.pieces
        sizes: dict[Hashable, int] = {}
        steps: dict[str, list[Step]] = {}
        staying: dict[str, frozenset[Hashable]] = {}
        holders: dict[tuple[str, str], list[Node]] = defaultdict(list)
        repeated = {nodes[0]: seconds for nodes, seconds in self.kernels["B"] if _is_repeated(nodes[0])}
        for op in "FB":
            graph = pieces[op].module.graph
            known: set[Hashable] = set()
            steps[op] = []
            for node in graph.nodes:
                sizes |= {self._which(t): t.untyped_storage().nbytes() for t in tensors_of(node.meta.get("val"))}
                own = self._counted([node])
                if node.op == "call_function":
                    touches, makes = self._counted([node, *node.all_input_nodes]), own - known
                    how = _is_repeated(node), node in self.own, repeated.get(node, 0.0)
                    steps[op].append(Step(self.at[op][node], touches, makes, *how))
                elif node.op == "placeholder" and node.meta["slot"] != LOSS:
                    holders[op, node.meta["slot"].kind].append(node)
                known |= own
            outputs = zip(pieces[op].outputs, output_values(graph), strict=True)
            staying[op] = self._counted(node for slot, node in outputs if slot.kind != "saved")
        return BlockMemory(
            self.length,
            sizes,
            steps,
            self._counted([*holders["B", "saved"], *holders["B", "activation"]]),
            {op: self._counted(holders[op, "activation"]) for op in "FB"},
            self._counted(holders["B", "tangent"]),
            staying,
            kept,
            residue,
            held,
        )

    def _viewed(self) -> set[Hashable]:
        forward = self.program.pieces["F"]
        saved = zip(forward.outputs, output_values(forward.module.graph), strict=True)
        nodes = [node for slot, node in saved if slot.kind == "saved"]
        own = self._counted(node for node in nodes if not is_view(node))
        return {*self._counted(nodes)} - own - self._counted(forward.module.graph.find_nodes(op="placeholder"))

    def _which(self, tensor: torch.Tensor) -> Hashable:
        key = storage_key(tensor)
        return self.names.get(key, ("", key))

    def _counted(self, nodes: Iterable[Any]) -> frozenset[Hashable]:
        """The storages behind nodes, without those that live longer than a step."""
        tensors = (t for n in nodes if isinstance(n, Node) for t in tensors_of(n.meta.get("val")))
        return frozenset(self._which(t) for t in tensors if storage_key(t) not in self.resident)


def _is_repeated(node: Node) -> bool:
    return node.meta.get("pass") == "recompute"


def _alike(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and (one.shape, one.dtype) == (other.shape, other.dtype)


def exchange_seconds(collective: Collective, choices: Choices, device: str) -> float:
    """The time of a collective on the hardware."""
    return (choices.hardware or hardware_for(device)).exchange_seconds(collective.bytes, collective.kind)


def _joined(canonical: Canonical, blocks: Sequence[tuple[Stage, Prices]]) -> Prices:
    """The prices of blocks in a row, in which a storage that several of them know is one."""
    storages = {n.name: storages_behind([n]) for n in canonical.graph.nodes}
    found = Prices(([], [], []), ([], []), [], [], [], [], [], {}, {}, {}, set())
    for number, (stage, prices) in enumerate(blocks):
        first = len(found.saved)
        names = {"received": _received(stage), "sent": _sent(stage), "own": [n.name for n in stage.module.graph.nodes]}
        for times, more in zip((*found.seconds, *found.exchange), (*prices.seconds, *prices.exchange), strict=True):
            times += more
        found.saved += prices.saved
        found.passing += prices.passing
        parts = ((found.kept, prices.kept), (found.held, prices.held), (found.residue, prices.residue))
        for uses, part in parts:
            uses += [(first + place, _known(which, number, names, storages), size) for place, which, size in part]
        found.blocks[first], found.memory[first] = prices.blocks[0], prices.memory[0]
        found.viewed |= {_known(which, number, names, storages) for which in prices.viewed}
        found.received[first] = frozenset(key for name in names["received"] for key in storages.get(name, ()))
    return found


def _known(which: Any, block: int, names: Mapping[str, list[str]], storages: Mapping[str, set[int]]) -> Hashable:
    kind, number = which
    if kind not in names:
        return block, number
    name = names[kind][number]
    return next(iter(storages.get(name, ())), name)
