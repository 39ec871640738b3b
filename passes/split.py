"""The split: a stage's joint graph becomes F, B (input gradients), W (weight gradients) and BW (both at once).

F is what the stage's outputs need. Of the rest, B is what the input gradients need, W what remains. The first stage has
no input gradient; there B is everything that more than one parameter needs (the gradient of the embedding output stands
in for an input gradient), so that its B and W balance like those of a middle stage.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.canonical import is_getitem, is_random
from zbcompile.passes.costs import storage_bytes, storage_key_of, tensors_of
from zbcompile.passes.joint import Joint
from zbcompile.passes.slots import Slot


@dataclass(frozen=True)
class Piece:
    """One executable graph: call `module` with values for `inputs`, get values for `outputs`, in these orders."""

    name: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def empty(self) -> bool:
        """Whether it computes nothing: no gradient leaves it and nothing is accumulated."""
        return not any(node.op == "call_function" for node in self.module.graph.nodes)


@dataclass(frozen=True)
class Split:
    """The four pieces of a stage, in canonical form (gradients are outputs; nothing is accumulated yet)."""

    joint: Joint
    forward: Piece
    backward: Piece
    weight: Piece
    fused: Piece
    crossing: "Crossing"


@dataclass(frozen=True)
class Crossing:
    """What waits between the passes, in bytes counted by storage (views once; parameters and user inputs not at all).

    `kept` is everything alive between F and B, `residue` everything alive between B and W; the other three say which
    pass it was made by (or arrived in) and which needs it.
    """

    forward_to_backward: int
    forward_to_weight: int
    backward_to_weight: int
    kept: int
    residue: int


def split(joint: Joint) -> Split:
    """Split the joint graph of a stage. Every value is computed in exactly one of F, B and W."""
    forward = forward_nodes(joint)
    everything = needed_nodes(joint, lambda slot: slot.kind in ("gradient", "input_gradient"))
    early = needed_nodes(joint, lambda slot: slot.kind == "input_gradient")
    if not any(slot.kind == "input_gradient" for slot, _ in joint.outputs):
        early = _shared_by_parameters(joint, everything - forward)
    early |= {node for node in everything if "recomputed" in node.meta}  # W runs no operation of the forward
    backward = _close(early - forward, joint) & everything
    weight = everything - forward - backward
    pieces = _Extractor(joint, {"F": forward, "B": backward, "W": weight, "BW": backward | weight})
    f, b, w, bw = pieces.extract("F"), pieces.extract("B"), pieces.extract("W"), pieces.extract("BW")
    return Split(joint, f, b, w, bw, _crossing(joint, pieces))


def forward_nodes(joint: Joint) -> set[Node]:
    """What F computes: the stage's outputs, and every random number."""
    return _close(needed_nodes(joint, lambda slot: slot in joint.stage.outputs) | _random_nodes(joint), joint)


def needed_nodes(joint: Joint, wanted: Callable[[Slot], bool]) -> set[Node]:
    """The dependency closure of the chosen outputs, placeholders excluded."""
    found: set[Node] = set()
    queue = [node for slot, node in joint.outputs if wanted(slot)]
    while queue:
        node = queue.pop()
        if node.op not in ("placeholder", "get_attr") and node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def _random_nodes(joint: Joint) -> set[Node]:
    """Eager draws these numbers whether or not they are used, and only in the forward."""
    roots = {node for node in joint.module.graph.nodes if is_random(node)}
    found, queue = set(), list(roots)
    while queue:
        node = queue.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def _close(nodes: set[Node], joint: Joint) -> set[Node]:
    """Add the getitems of multi-output nodes: a tuple is never kept, its parts are."""
    return nodes | {n for n in joint.module.graph.nodes if is_getitem(n) and n.args[0] in nodes}


def _shared_by_parameters(joint: Joint, backward: set[Node]) -> set[Node]:
    """Of a first stage's backward nodes, those that the gradients of several parameters need."""
    reach: dict[Node, set[str]] = {node: set() for node in backward}
    for slot, node in joint.outputs:
        if slot.kind == "gradient" and node in reach:
            reach[node].add(slot.name)
    for node in reversed(list(joint.module.graph.nodes)):
        for argument in node.all_input_nodes:
            if node in reach and argument in reach:
                reach[argument] |= reach[node]
    final = {node for slot, node in joint.outputs if slot.kind == "gradient"}
    return {node for node, names in reach.items() if len(names) > 1 and not _only_makes(node, final)}


def _only_makes(node: Node, final: set[Node]) -> bool:
    """A multi-output node all of whose parts are gradients of parameters belongs to W."""
    return bool(node.users) and all(is_getitem(user) and user in final for user in node.users)


class _Extractor:
    """Cuts pieces out of a joint graph; values that cross between pieces become `saved` slots."""

    def __init__(self, joint: Joint, pieces: dict[str, set[Node]]) -> None:
        self.joint = joint
        self.pieces = pieces
        self.order = list(joint.module.graph.nodes)
        self.slot_of = {node: slot for slot, node in joint.inputs}
        self.mutated = {slot.name for slot in joint.stage.outputs if slot.kind == "mutation"}

    def later(self, name: str) -> list[str]:
        return {"F": ["B", "W"], "B": ["W"]}.get(name, [])

    def arriving(self, name: str) -> list[Node]:
        """The nodes outside a piece that its nodes and outputs read, in graph order."""
        inside = self.pieces[name]
        read = {a for node in inside for a in node.all_input_nodes}
        read |= {node for slot, node in self._outputs(name) if node not in inside}
        return [n for n in self.order if n in read and n not in inside and n.op != "get_attr"]

    def saved(self, name: str) -> list[Node]:
        """The nodes of a piece that later pieces read, in graph order; for F also mutated buffers that they read."""
        read = {n for later in self.later(name) for n in self.arriving(later)}
        return [n for n in self.order if n in read and (n in self.pieces[name] or self._must_copy(name, n))]

    def _must_copy(self, name: str, node: Node) -> bool:
        """A buffer that later microbatches overwrite is kept as F saw it."""
        slot = self.slot_of.get(node)
        return name == "F" and slot is not None and slot.kind == "buffer" and slot.name in self.mutated

    def slot(self, name: str, node: Node) -> Slot:
        """The slot by which a piece reads a node that it does not compute."""
        if node in self.slot_of and not (name != "F" and self._must_copy("F", node)):
            return self.slot_of[node]
        return Slot("saved", node.name)

    def _outputs(self, name: str) -> list[tuple[Slot, Node]]:
        return [(slot, node) for slot, node in self.joint.outputs if _belongs(slot, name)]

    def extract(self, name: str) -> Piece:
        graph, copies = Graph(), {}
        inputs = [(self.slot(name, node), node) for node in self.arriving(name)]
        for slot, node in inputs:
            copies[node] = graph.placeholder(slot.identifier)
            copies[node].meta = {**node.meta, "slot": slot}
        outputs = [*self._outputs(name), *((Slot("saved", node.name), node) for node in self.saved(name))]
        kept_attributes = {a for n in self.pieces[name] for a in n.all_input_nodes if a.op == "get_attr"}
        for node in self.order:
            if node in self.pieces[name] or node in kept_attributes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([_result(graph, slot, node, copies, self) for slot, node in outputs])
        module = GraphModule(self.joint.module, graph, class_name=f"{name}{self.joint.stage.index}")
        return Piece(name, module, tuple(slot for slot, _ in inputs), tuple(slot for slot, _ in outputs))


def _result(graph: Graph, slot: Slot, node: Node, copies: dict[Node, Node], extractor: _Extractor) -> Node:
    if slot.kind != "saved" or not extractor._must_copy("F", node):
        return copies[node]
    clone = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
    clone.meta = {**node.meta, "pass": "split"}
    return clone


def _belongs(slot: Slot, piece: str) -> bool:
    if slot.kind == "input_gradient":
        return piece in ("B", "BW")
    if slot.kind == "gradient":
        return piece in ("W", "BW")
    return piece == "F"


def _crossing(joint: Joint, pieces: _Extractor) -> Crossing:
    whole = ("parameter", "buffer", "constant", "input", "tangent")
    resident = [n for slot, n in joint.inputs if slot.kind in whole and not pieces._must_copy("F", n)]
    free = {storage_key_of(t) for n in resident for t in tensors_of(n.meta["val"])}
    for_backward, for_weight = pieces.arriving("B"), pieces.arriving("W")
    of_backward = pieces.pieces["B"]
    tangents = {n for slot, n in joint.inputs if slot.kind == "tangent"}
    made_later = [n for n in for_weight if n in of_backward or n in tangents]
    made_before = [n for n in for_weight if n not in of_backward and n not in tangents]
    before_backward = [n for n in for_backward if n not in tangents]
    keep = free - {storage_key_of(t) for n in tangents for t in tensors_of(n.meta["val"])}

    def size(nodes: Iterable[Node]) -> int:
        return storage_bytes([t for n in nodes for t in tensors_of(n.meta["val"])], keep)

    return Crossing(
        size(before_backward),
        size(made_before),
        size(made_later),
        size({*before_backward, *made_before}),
        size(for_weight),
    )
