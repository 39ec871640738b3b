"""Cutting: from the canonical graph and an assignment of its nodes to stages to one graph per stage."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.capture.autocast import autocast_key
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import is_getitem, is_random
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.strides import boundary_like
from zbcompile.passes.partition.liveness import Line, held_behind, replicable
from zbcompile.passes.partition.search import Cuts
from zbcompile.passes.torch_private import LazyGraphModule

aten = torch.ops.aten
Assignment = Mapping[Node, int]


@dataclass(frozen=True)
class Stage:
    """A pure forward graph: every input is a placeholder with `meta["slot"]`, `outputs` names what it returns."""

    index: int
    module: GraphModule
    outputs: tuple[Slot, ...]
    random: bool

    @property
    def inputs(self) -> tuple[Slot, ...]:
        return tuple(node.meta["slot"] for node in self.module.graph.find_nodes(op="placeholder"))

    def named(self, kind: str) -> tuple[str, ...]:
        """The names of the inputs of one kind."""
        return tuple(slot.name for slot in self.inputs if slot.kind == kind)


def assign_by_cuts(line: Line, cuts: Cuts) -> dict[Node, int]:
    """The stage of every node on the line."""
    return {node: cuts.stage_of(i) for i, node in enumerate(line.nodes)}


def assign_by_parameters(
    canonical: Canonical, line: Line, homes: Mapping[str, tuple[int, ...]], stages: int
) -> dict[Node, int]:
    """The stage of every node when each parameter and buffer already has its stages (`homes`), as in evaluation.

    A node runs in the first stage that is not before those of its inputs and that holds all its parameters, but the
    loss is made in the last, even if that trains nothing. A node without parameters comes no earlier than the readers
    before it of a value with a gradient: eager adds the gradients of a value from its last reader to its first.
    """
    assigned: dict[Node, int] = {}
    read: dict[Node, int] = {}  # the last stage so far that sends a gradient back to a value
    on_line = frozenset(line.nodes)
    losses = {node for slot, node in canonical.outputs if slot.kind == "loss"}
    for node in line.nodes:
        inputs = [a for a in node.all_input_nodes if a in assigned]
        earliest = stages - 1 if node in losses else max((assigned[a] for a in inputs), default=0)
        held = [holder.meta["slot"].name for holder in held_behind(node, on_line)]
        owned = [homes[name] for name in held if name in homes]
        sources = [a for a in inputs if a.meta["differentiable"]] if node.meta["differentiable"] else []
        if not owned and not is_getitem(node):
            earliest = max([earliest, *(read.get(a, 0) for a in sources)])
        assigned[node] = earliest if is_getitem(node) else _home(node, earliest, owned)
        read |= {a: max(read.get(a, 0), assigned[node]) for a in sources}
    return assigned


def _home(node: Node, earliest: int, owned: Sequence[tuple[int, ...]]) -> int:
    stages = sorted(set.intersection(*map(set, owned))) if owned else [earliest]
    later = [stage for stage in stages if stage >= earliest]
    if not later:
        raise PartitionError(
            f"{node.name} needs its inputs from stage {earliest} and parameters that live on stages {owned}: this "
            "graph uses them in a different order than the training graph that placed them. Compile a separate "
            "pipeline for it."
        )
    return later[0]


class ValueLeg(NamedTuple):
    """A value on its way from one stage to the next."""

    value: Node
    source: int

    @property
    def slot(self) -> Slot:
        return Slot("activation", self.value.name)


def cut(
    canonical: Canonical,
    line: Line,
    assigned: Assignment,
    stages: int,
    exact: bool = False,
) -> tuple[Stage, ...]:
    """One graph per stage. What a stage can compute for itself (`replicable`) is copied into it, not sent.

    With `exact` the values that cross keep their strides even if these leave gaps, and gradients are added in the order
    of eager. Values that skip stages pass through every stage between.
    """
    anywhere = replicable(canonical, line.flops)
    legs = list(legs_of(canonical, line.nodes, assigned.get, stages - 1))
    arriving = ([leg for leg in legs if leg.source == s - 1] for s in range(stages))
    leaving = ([leg for leg in legs if leg.source == s] for s in range(stages))
    return tuple(
        _build(canonical, line, assigned, _Builder(anywhere, exact, came), left, s, s == stages - 1)
        for s, (came, left) in enumerate(zip(arriving, leaving, strict=True))
    )


def legs_of(
    canonical: Canonical,
    values: Iterable[Node],
    stage_of: Callable[[Node, int], int],
    last: int,
) -> Iterator[ValueLeg]:
    """The legs of those of `values` that stages after their own read, value by value. What a trunk makes for a sharded
    output layer goes on to the `last` stage. `stage_of(node, -1)` is the stage of a node, or -1 if it is on none."""
    ends = {node for slot, node in canonical.outputs if slot.kind == "activation"}
    for node in values:
        maker = stage_of(node, -1)
        readers = [stage_of(user, -1) for user in node.users]
        farthest = max([*readers, *[last] * (node in ends)], default=maker)
        yield from (ValueLeg(node, stage) for stage in range(maker, farthest))


class _Builder:
    """Copies nodes of the canonical graph into one stage, making placeholders on first use: for what is `arriving`, for
    inputs, and not for what may be computed `anywhere`."""

    def __init__(self, anywhere: set[Node], exact: bool, arriving: Sequence[ValueLeg]) -> None:
        self.graph = Graph()
        self.anywhere, self.exact = anywhere, exact
        self.copies: dict[Node, Node] = {}
        self.casts: dict[Hashable, Node] = {}
        self.sent: dict[Node, Node] = {}
        for leg in arriving:
            self.copies[leg.value] = self._placeholder(leg.value, leg.slot)

    def value(self, node: Node) -> Node:
        """The stage's own node for a node of the canonical graph."""
        if node not in self.copies:
            if node.op == "placeholder":
                self.copies[node] = self._placeholder(node, node.meta["slot"])
            elif node in self.anywhere:
                self.copies[node] = self.graph.node_copy(node, self.value)
            else:
                raise PartitionError(f"{node.name} is used by a stage before the one that computes it.")
        return self.copies[node]

    def compute(self, node: Node) -> None:
        key = autocast_key(node)
        if key is None:
            self.copies[node] = self.graph.node_copy(node, self.value)
            return
        if key not in self.casts:
            self.casts[key] = self.graph.node_copy(node, self.value)
            self.casts[key].meta.pop("autocast", None)  # no later pass reads it
        self.copies[node] = self.casts[key]

    def leaving(self, node: Node) -> Node:
        """A value with the strides in which other stages receive it."""
        if node not in self.sent:
            self.sent[node] = self._laid_out(node)
        return self.sent[node]

    def _laid_out(self, node: Node) -> Node:
        own, value = self.value(node), node.meta["val"]
        received = boundary_like(value, self.exact)
        if received.stride() == value.stride():
            return own
        copy = self.graph.call_function(aten.clone.default, (own,), {"memory_format": torch.contiguous_format})
        copy.meta = {**own.meta, "val": received, "pass": "cut"}
        return copy

    def _placeholder(self, node: Node, slot: Slot) -> Node:
        new = self.graph.placeholder(f"{slot.kind}_{node.name}")
        new.meta = {**node.meta, "slot": slot}
        if slot.kind == "activation":
            new.meta["val"] = boundary_like(node.meta["val"], self.exact)
        return new


def _build(
    canonical: Canonical,
    line: Line,
    assigned: Assignment,
    builder: _Builder,
    leaving: Sequence[ValueLeg],
    stage: int,
    last: bool,
) -> Stage:
    own = [node for node in line.nodes if assigned[node] == stage]
    for node in own:
        builder.compute(node)
    outputs = [(leg.slot, builder.leaving(leg.value)) for leg in leaving]
    for slot, node in canonical.outputs:
        here = last if slot.kind == "activation" else assigned.get(node, 0) == stage
        if isinstance(node, Node) and here:
            outputs.append((slot, builder.value(node)))
    builder.graph.output(tuple(node for _, node in outputs))
    _placeholders_first(builder.graph)
    module = LazyGraphModule(canonical.module, builder.graph, class_name=f"Stage{stage}")
    return Stage(stage, module, tuple(slot for slot, _ in outputs), any(is_random(node) for node in own))


def _placeholders_first(graph: Graph) -> None:
    first = next(iter(graph.nodes))
    for node in reversed(graph.find_nodes(op="placeholder")):
        if node is not first:
            first.prepend(node)
            first = node
