"""The joint graph of a stage, of which each distinct segment is traced once.

A segment ends where one value alone leads from what was computed to what follows, as between two halves of a layer.
Autograd runs the whole backward of later segments before that of earlier ones, so what it makes of segments, put
together, is what it makes of the stage.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import count_uses, leaf_like, like, operator_name, output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import moved_value
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.joint_graph import Joint, data_of, gradient_slot, joint_of, trace_joint
from zbcompile.passes.stage.deduplicate import Renaming, Tangents, compile_distinct
from zbcompile.passes.torch_private import FakeTensorMode, LazyGraphModule, storage_key

_REGION = "recompute"
_GRADIENTS = ("gradient", "input_gradient", "virtual_gradient")


class _Traced(NamedTuple):
    """The joint graph of a segment, or of an equal one, of which `to` knows the names here."""

    joint: Joint
    to: Renaming | None = None


def _under(traced: Any, to: Renaming) -> Any:
    return traced._replace(to=to)


def trace_in_segments(
    stage: Stage,
    trainable: frozenset[str],
    tangents: Tangents,
    exact: bool,
    dimensions: Mapping[str, str],
    known: MutableMapping[Hashable, object],
) -> Joint:
    """The joint graph that `trace_joint` makes of `stage`, of which segments are traced that `known` does not have yet.
    Whole it is traced if it has no segments, reads constants, or exchanges along other dimensions than "pp": the flow
    of gradients is recorded of whole stages."""

    def trace(segment: Stage, arriving: Tangents) -> tuple[Any, Tangents]:
        joint = trace_joint(segment, trainable, arriving, exact, dimensions)
        leaving = {slot.name: node.meta["val"] for slot, node in joint.outputs if slot.kind == "input_gradient"}
        return _Traced(joint), leaving

    watched = set(dimensions.values()) - {"pp"}
    segments = () if watched or not tangents else tuple(segments_of(stage))
    if len(segments) > 1:
        behind = None if "loss" in tangents else tangents
        made: Any = compile_distinct(segments, trainable, trace, behind, _under, known=known)
        if not any(each.joint.module.graph.find_nodes(op="get_attr") for each in made):
            return _composed(stage, trainable, tangents, tuple(zip(segments, made, strict=True)), exact)
    return trace_joint(stage, trainable, tangents, exact, dimensions)


def segments_of(stage: Stage) -> Iterator[Stage]:
    """The segments of a stage, in order, as stages of their own."""
    nodes = [node for node in stage.module.graph.nodes if node.op == "call_function"]
    data = data_of(stage)
    ends = [0, *_ends(stage.module.graph, nodes, data), len(nodes)]
    segment_of = {node: n for n, (begin, end) in enumerate(pairwise(ends)) for node in nodes[begin:end]}
    results: list[list[tuple[Slot, Node]]] = [[] for _ in ends[1:]]
    for slot, node in zip(stage.outputs, output_values(stage.module.graph), strict=True):
        if node in segment_of:
            results[segment_of[node]].append((slot, node))
    for n, (begin, end) in enumerate(pairwise(ends)):
        later = [node for node in nodes[begin:end] if any(segment_of.get(user, n) > n for user in node.users)]
        leaving = [*results[n], *((_crossing(node, data), node) for node in later)]
        yield _segment(stage, nodes[begin:end], leaving, data)


def _ends(graph: Graph, nodes: Sequence[Node], data: Collection[Node]) -> list[int]:
    """The places in `nodes` behind which one value alone is read that gradients flow through, and is so several times
    (else each operation of a chain would be a segment). What is returned is read, and gets a gradient, behind them."""
    place = {node: i for i, node in enumerate(nodes)} | {graph.output_node(): len(nodes)}
    reads = {node: [place[user] for user in node.users] for node in graph.nodes if node.meta.get("differentiable")}
    if any(node.op == "placeholder" and graph.output_node() in node.users for node in reads):
        return []
    changes = [0] * (len(nodes) + 2)
    for node, read in reads.items():
        if read:
            changes[place.get(node, min(read)) + 1] += 1
            changes[max(read) + 1] -= 1
    alive = list(accumulate(changes))
    alone = (node for node in nodes if alive[place[node] + 1] == 1 and max(reads.get(node, [0])) > place[node] + 1)
    tensors = (node for node in alone if node in data and isinstance(node.meta["val"], torch.Tensor))
    return [place[node] + 1 for node in tensors if count_uses(node) > 1 and graph.output_node() not in node.users]


def _segment(
    stage: Stage, nodes: Sequence[Node], leaving: Sequence[tuple[Slot, Node]], data: Collection[Node]
) -> Stage:
    graph, copies, own = Graph(), dict[Node, Node](), set(nodes)
    for node in dict.fromkeys(each for user in nodes for each in user.all_input_nodes if each not in own):
        slot = node.meta["slot"] if node.op == "placeholder" else _crossing(node, data)
        copies[node] = graph.placeholder(slot.identifier)
        kept = node.meta if node.op == "placeholder" else {key: node.meta[key] for key in ("val", "differentiable")}
        copies[node].meta = {**kept, "slot": slot}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for _, node in leaving))
    module = LazyGraphModule(stage.module, graph, class_name=type(stage.module).__name__)
    return Stage(stage.index, module, tuple(slot for slot, _ in leaving), stage.random)


def _crossing(node: Node, data: Collection[Node]) -> Slot:
    """What does not depend on data is no activation, see `first_activations`."""
    return Slot("activation" if node in data else "buffer", node.name)


def _composed(
    stage: Stage, trainable: frozenset[str], tangents: Tangents, parts: Sequence[tuple[Stage, _Traced]], exact: bool
) -> Joint:
    """The graph of a stage from those of its segments: all forwards, then all backwards, the last one first."""
    graph, mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        values = [leaf_like(node, trainable) for node in stage.module.graph.find_nodes(op="placeholder")]
        values += [like(value) for value in tangents.values()]
    found = dict[Slot, Node]()
    slots = [*stage.inputs, *(Slot("tangent", name) for name in tangents)]
    for number, (slot, value) in enumerate(zip(slots, values, strict=True)):
        found[slot] = graph.placeholder(f"arg{number}_1")
        found[slot].meta = {"val": value.detach() if isinstance(value, torch.Tensor) else value, "slot": slot}
    inputs = tuple(found.items())
    copies = [_Copy(graph, mode, found, segment, *traced) for segment, traced in parts]
    for copy in copies:
        copy.add_forward()
    for copy in reversed(copies):
        copy.add_backward()
    results = [
        (slot, n) for slot, n in zip(stage.outputs, output_values(stage.module.graph), strict=True) if n is not None
    ]
    outputs = [(slot, found[n.meta["slot"] if n.op == "placeholder" else slot]) for slot, n in results]
    gradients = [each for copy in copies for each in copy.gradients]
    by_slot: dict[Slot, list[Node]] = {}  # a parameter with separate uses has one gradient per use
    for slot, node in gradients:
        by_slot.setdefault(slot, []).append(node)
    outputs += [(slot, node) for slot in map(gradient_slot, stage.inputs) for node in by_slot.get(slot, ())]
    outputs += [(slot, node) for slot, node in gradients if slot.kind == "virtual_gradient"]
    graph.output([node for _, node in outputs])
    return joint_of(stage, GraphModule({}, graph, class_name="_JointFunction"), inputs, tuple(outputs), exact)


class _Copy:
    """A segment in a graph in the making, of which `found` has inputs, outputs and what crosses segments."""

    def __init__(
        self,
        graph: Graph,
        mode: FakeTensorMode,
        found: dict[Slot, Node],
        segment: Stage,
        joint: Joint,
        to: Renaming | None,
    ) -> None:
        self.graph, self.mode, self.found, self.joint, self.to = graph, mode, found, joint, to
        self.copies = dict[Node, Node]()
        self.storages = dict[int, Any]()
        self.gradients = list[tuple[Slot, Node]]()
        twins = list(zip(joint.stage.module.graph.nodes, segment.module.graph.nodes, strict=True))
        self.names = {old.name: new.name for old, new in twins}
        self.regions = {old.meta.get(_REGION): new.meta.get(_REGION) for old, new in twins}

    def add_forward(self) -> None:
        self._add(lambda slot: slot.kind != "tangent", forward=True)
        self.found |= {slot: node for slot, node in self._results() if slot.kind not in _GRADIENTS}

    def add_backward(self) -> None:
        self._add(lambda slot: slot.kind == "tangent", forward=False)
        self.gradients = [(slot, node) for slot, node in self._results() if slot.kind in _GRADIENTS]
        arrive = {slot.name: node for slot, node in self.gradients if slot.kind == "input_gradient"}
        self.found |= {Slot("tangent", name): node for name, node in arrive.items()}

    def _results(self) -> Iterator[tuple[Slot, Node]]:
        return ((self._slot(slot), self.copies[node]) for slot, node in self.joint.outputs if node in self.copies)

    def _slot(self, slot: Slot) -> Slot:
        if slot.kind == "virtual_gradient":
            return slot.called(self.names[slot.name])
        return slot if self.to is None else self.to.slot(slot)

    def _add(self, reads: Callable[[Slot], bool], forward: bool) -> None:
        for node in (node for slot, node in self.joint.inputs if reads(slot)):
            self.copies[node] = here = self.found[self._slot(node.meta["slot"])]
            if isinstance(here.meta["val"], torch.Tensor):
                self.storages[storage_key(node.meta["val"])] = here.meta["val"].untyped_storage()
        for node in self.joint.module.graph.nodes:
            if node.op == "call_function" and (node in self.joint.forward) == forward:
                self.copies[node] = self._copied(node)

    def _copied(self, node: Node) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), self.copies.__getitem__)
        new = self.graph.create_node("call_function", node.target, args, kwargs, operator_name(node))
        new.meta = {**node.meta, "val": moved_value(node.meta.get("val"), self.storages, self.mode)}
        if _REGION in new.meta:
            new.meta[_REGION] = self.regions[new.meta[_REGION]]
        new.meta |= {} if self.to is None else self.to.source_of(node)
        return new
