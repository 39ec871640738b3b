"""Pieces: the executable graphs that a joint graph is cut into, and how values pass from one to the next."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import storages_behind, tensors_of
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.torch_private import LazyGraphModule, storage_key

LATER = {"F": ("B", "W"), "B": ("W",), "W": (), "BW": ()}


@dataclass(frozen=True)
class Piece:
    """One executable graph: call `module` with values for `inputs`, get values for `outputs`, in these orders."""

    name: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def empty(self) -> bool:
        """Whether the piece computes nothing: no gradient leaves it and nothing is accumulated."""
        return not any(node.op == "call_function" for node in self.module.graph.nodes)


@dataclass(frozen=True)
class Assignment:
    """Which nodes of a joint graph each of F, B and W computes (BW: what B or W does). W may repeat some of F and B."""

    joint: Joint
    nodes: Mapping[str, Set[Node]]

    def arriving(self, name: str) -> list[Node]:
        """The nodes outside a piece that its nodes and outputs read, in graph order."""
        inside = self.nodes[name]
        read = {a for node in inside for a in node.all_input_nodes}
        read |= {node for _, node in self.results(name)}
        return [n for n in self.joint.module.graph.nodes if n in read and n not in inside and n.op != "get_attr"]

    def results(self, name: str) -> list[tuple[Slot, Node]]:
        """The outputs of the joint graph that a piece returns."""
        return [(slot, node) for slot, node in self.joint.outputs if name in _RETURNS.get(slot.kind, ("F",))]

    def saved(self, name: str) -> list[Node]:
        """The values of a piece that later pieces read, in graph order; for F also mutated buffers that they read."""
        read = {n for later in LATER[name] for n in self.arriving(later)}
        made = self.nodes[name] if name == "F" else self.nodes[name] - self.nodes["F"]
        order = self.joint.module.graph.nodes
        return [n for n in order if n in read and (n in made or (name == "F" and self.copied(n)))]

    def copied(self, node: Node) -> bool:
        """Whether F must save a copy: the buffer aliased here is overwritten by a later microbatch."""
        return not self.overwritten.isdisjoint(storages_behind((node,)))

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """The storages of buffers that F changes."""
        names = {slot.name for slot in self.joint.stage.outputs if slot.kind == "mutation"}
        inputs = self.joint.inputs
        return frozenset(storages_behind(n for slot, n in inputs if slot.kind == "buffer" and slot.name in names))


# Which pieces return an output of the joint graph; F returns all others. No piece returns a virtual gradient.
_RETURNS = {"input_gradient": ("B", "BW"), "gradient": ("W", "BW"), "virtual_gradient": ()}


def share_views(assignment: Assignment) -> Assignment:
    """If W reads several views of one storage, let their base wait, one value per storage, and W take the views."""
    arriving: dict[int, list[Node]] = {}
    for node in assignment.arriving("W"):
        for tensor in tensors_of(node.meta.get("val")):
            arriving.setdefault(storage_key(tensor), []).append(node)
    taken = {view for key, nodes in arriving.items() if len(nodes) > 1 for view in _views_to_take(nodes, key)}
    nodes = {name: own | taken if name in ("W", "BW") else own for name, own in assignment.nodes.items()}
    return replace(assignment, nodes=nodes)


def _views_to_take(nodes: list[Node], key: int) -> set[Node]:
    """The views between `nodes` and the closest tensor that all of them are views of."""
    chains = [_views_behind(node, key) for node in nodes]
    common = [n for n in chains[0] if isinstance(n.meta["val"], torch.Tensor) and all(n in chain for chain in chains)]
    return {view for chain in chains for view in chain[: chain.index(common[0])]} if common else set()


def _views_behind(node: Node, key: int) -> list[Node]:
    """A node and the values that it is a view of, the nearest first."""
    chain = [node]
    while behind := [a for a in chain[-1].all_input_nodes if key in map(storage_key, tensors_of(a.meta.get("val")))]:
        chain.append(behind[0])
    return chain


def extract(assignment: Assignment, name: str) -> Piece:
    """The graph of one piece. What it keeps for later pieces becomes `saved` slots."""
    return _Extractor(assignment, name).piece()


class _Extractor:
    def __init__(self, assignment: Assignment, name: str) -> None:
        self.assignment, self.name = assignment, name
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.slot_of = {node: slot for slot, node in assignment.joint.inputs}

    def piece(self) -> Piece:
        assignment, name = self.assignment, self.name
        inputs = [(self._slot(node), node) for node in assignment.arriving(name)]
        for slot, node in inputs:
            self.copies[node] = holder = self.graph.placeholder(slot.identifier)
            holder.meta = {**node.meta, "slot": slot}
        outputs = [*assignment.results(name), *((Slot("saved", n.name), n) for n in assignment.saved(name))]
        self._copy_nodes()
        self.graph.output([self._result(slot, node) for slot, node in outputs])
        joint = assignment.joint
        module = LazyGraphModule(joint.module, self.graph, class_name=f"{name}{joint.stage.index}")
        return Piece(name, module, tuple(slot for slot, _ in inputs), tuple(slot for slot, _ in outputs))

    def _slot(self, node: Node) -> Slot:
        """The slot by which the piece reads a node that it does not compute."""
        if node in self.slot_of and (self.name == "F" or not self.assignment.copied(node)):
            return self.slot_of[node]
        return Slot("saved", node.name)

    def _copy_nodes(self) -> None:
        inside = self.assignment.nodes[self.name]
        attributes = {a for node in inside for a in node.all_input_nodes if a.op == "get_attr"}
        earlier = self.assignment.nodes["F"] | self.assignment.nodes["B"] if self.name == "W" else frozenset[Node]()
        for node in self.assignment.joint.module.graph.nodes:
            if node in inside or node in attributes:
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
                if node in earlier:
                    self.copies[node].meta["repeated"] = True

    def _result(self, slot: Slot, node: Node) -> Node:
        if self.name != "F" or slot.kind == "mutation" or not self.assignment.copied(node):
            return self.copies[node]
        clone = self.graph.call_function(torch.ops.aten.clone.default, (self.copies[node],))
        clone.meta = {**node.meta, "val": node.meta["val"].clone(), "pass": "split"}  # in memory of its own
        return clone
