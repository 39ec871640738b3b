"""Along one dimension of the mesh, what every value of a stage's forward is on its ranks: equal, or differing.

The rules are closed: a family of operations that has no rule makes unknown values, and nothing is guessed. An operation
that does not communicate gives equal results for equal arguments; which arguments are constants made from a rank's
number is known by comparing the ranks' graphs (`texts_of`).
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import NodeNumber, is_getitem
from zbcompile.passes.graph.process_groups import group_of, is_numbered, is_wait
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import content_of
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.torch_private import TO_COPY, UNSAFE_VIEW
from zbcompile.passes.verification.exchanges import Exchange, exchange_of

RULES = 3  # the version of the rules: to be raised with each change of what they prove
Kind = Literal["zero", "equal", "differing", "unknown"]  # zero is equal, whichever part of it a rank has

aten = torch.ops.aten
# Of zeros they make zeros, whichever part of them: a rank may pad or slice them as it likes.
_KEEP_ZERO = {
    *(aten.neg, aten.view, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze, aten.squeeze),
    *(aten.slice, aten.select, aten.split, aten.clone, aten.constant_pad_nd, aten.sum, aten.mean, aten.detach),
    *(aten.alias, aten.add, aten.sub, aten.cat, UNSAFE_VIEW.overloadpacket, TO_COPY.overloadpacket),
}
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}
_SAME = {aten.detach, aten.alias}  # the value itself
# They take a shape from their argument, not its values.
_SHAPES = {
    *(aten.ones_like, aten.full_like, aten.empty_like, aten.new_ones, aten.new_full, aten.new_empty),
}


@dataclass(frozen=True)
class PlacementFault:
    """What is wrong at an operation of the user's model; `value` is the number of that whose gradient it spoils."""

    what: str
    node: Node
    value: int | None = None


@dataclass
class ValueKinds:
    """The kinds of a stage's forward along `dimension`. `given` are those of its inputs, `apart` the operations whose
    constants differ between the ranks, None if the ranks' graphs cannot be compared, `groups` this process's names of
    those in the graph."""

    dimension: str
    flow: GradientFlow
    given: Mapping[Slot, Kind]
    apart: Collection[Node] | None
    groups: Mapping[str, str]
    of: dict[Node, Kind] = field(default_factory=dict)
    data: set[Node] = field(default_factory=set)  # what depends on more than constants
    faults: list[PlacementFault] = field(default_factory=list)
    _exchanges: dict[Node, Exchange | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots = {node: slot for slot, node in self.flow.inputs}
        self.zeros = zeros_of(self.flow)
        for node in forward_nodes(self.flow):
            slot = slots.get(node)
            given = slot is not None and slot.kind != "constant"
            if given or not self.data.isdisjoint(node.all_input_nodes):
                self.data.add(node)
            computed = node.op == "call_function"
            self.of[node] = self._made_by(node) if computed else self._of_input(node, slot)

    def is_apart(self, node: Node) -> bool:
        return self.apart is None or node in self.apart

    def _of_input(self, node: Node, slot: Slot | None) -> Kind:
        if slot is not None and slot.kind != "constant":
            return self.given[slot]
        return "unknown" if self.apart is None else "differing" if self.is_apart(node) else "equal"

    def _made_by(self, node: Node) -> Kind:
        kinds = [self.of[each] for each in node.all_input_nodes]
        if is_wait(node) or is_getitem(node):
            return self._alike(node, kinds)
        group = group_of(node)
        if group == self.dimension:
            return self._of_collective(node, kinds)
        if group is not None and is_numbered(group):
            return "unknown"
        return self._alike(node, kinds)

    def _alike(self, node: Node, kinds: list[Kind]) -> Kind:
        """What an operation makes that does not communicate along this dimension."""
        if node in self.zeros:
            return "zero"
        kinds = [self.of[each] for each in operands_of(node)]
        if "unknown" in kinds or self.apart is None:
            return "unknown"
        return "differing" if "differing" in kinds or node in self.apart else "equal"

    def _of_collective(self, node: Node, kinds: list[Kind]) -> Kind:
        exchange = self.exchange(node)
        if exchange is None:
            return "unknown"
        if exchange.what == "none":
            return self._alike(node, kinds)
        if exchange.summed and set(kinds) == {"equal"} and not self.data.isdisjoint(node.all_input_nodes):
            self.faults.append(
                PlacementFault("sums what is the same on all ranks, which counts it once for each", node)
            )
        if exchange.what in ("sum", "largest", "gather"):
            return "equal"
        return "unknown" if "unknown" in kinds else "differing"

    def exchange(self, node: Node) -> Exchange | None:
        """What a collective does; None if that is not known."""
        if node not in self._exchanges:
            self._exchanges[node] = exchange_of(node, self.groups)
        return self._exchanges[node]


def forward_nodes(flow: GradientFlow) -> list[Node]:
    """The operations and inputs that no gradient reaches, in order."""
    reached = {node for slot, node in flow.inputs if slot.kind == "tangent"}
    found = []
    for node in flow.module.graph.nodes:
        if node in reached or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
        elif node.op != "output":
            found.append(node)
    return found


def zeros_of(flow: GradientFlow) -> set[Node]:
    """The operations that make zeros for sure: a value minus itself, which only passes its gradient on, and parts of
    zeros."""
    zeros = set[Node]()
    for node in flow.module.graph.nodes:
        packet, args = getattr(node.target, "overloadpacket", None), node.all_input_nodes
        itself = packet is aten.sub and len(node.args) == 2 and len({_itself(each) for each in node.args}) == 1
        of_zeros = bool(args) and zeros.issuperset(args) and (packet in _KEEP_ZERO or is_getitem(node))
        scaled = (packet is aten.mul and not zeros.isdisjoint(args)) or (packet is aten.div and node.args[0] in zeros)
        if itself or of_zeros or scaled or packet in _ZEROS:
            zeros.add(node)
    return zeros


def operands_of(node: Node) -> list[Node]:
    """The values that an operation takes: of some only the shape matters, a copy overwrites the first one."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.copy:
        return [each for each in node.args[1:2] if isinstance(each, Node)]
    return [] if packet in _SHAPES else node.all_input_nodes


def texts_of(flow: GradientFlow, constants: Mapping[str, torch.Tensor], dimension: str) -> list[str]:
    """A short text for each node of a stage's graph: how it is computed, from inputs by their names and from what is
    exchanged along `dimension`: if no other rank has that text, constants there differ from those of this rank."""
    slots = {node: slot for slot, node in flow.inputs}
    texts: dict[Node, str] = {}
    exchanges, zeros = 0, zeros_of(flow)
    for node in flow.module.graph.nodes:
        if group_of(node) == dimension:
            exchanges += 1
            texts[node] = f"exchange {exchanges}"
        elif node in zeros:
            texts[node] = "zero"
        elif node.op != "output":
            read = {each: NodeNumber(texts[each]) for each in operands_of(node)}
            given = map_arg((node.args, node.kwargs), read.get)  # type: ignore[arg-type]
            content = _content(node, slots.get(node), flow, constants)
            texts[node] = _hashed(slots.get(node) or node.target, given, content)
    return list(texts.values())


def _content(node: Node, slot: Slot | None, flow: GradientFlow, constants: Mapping[str, torch.Tensor]) -> bytes | None:
    """The values of a constant."""
    held = getattr(flow.module, str(node.target)) if node.op == "get_attr" else None
    if slot is not None and slot.kind == "constant":
        held = constants[slot.name]
    return content_of(held) if isinstance(held, torch.Tensor) else None


def _hashed(what: object, given: Any, content: bytes | None) -> str:
    return hashlib.sha256(repr((str(what), given, content)).encode()).hexdigest()[:12]


def _itself(node: Any) -> Any:
    while isinstance(node, Node) and getattr(node.target, "overloadpacket", None) in _SAME:
        node = node.args[0]
    return node
