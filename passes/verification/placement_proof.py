"""The proof that a step is right along a dimension of the mesh: that its loss is one, every gradient complete where
it leaves, nothing is summed twice, and buffers are written alike.

The stages are followed forward and back (`value_kinds`, `gradient_kinds`); what is left unknown is compared by the
first step instead.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from zbcompile.passes.graph.fx import nodes_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.torch_private import TO_COPY
from zbcompile.passes.verification.gradient_kinds import GradientKinds, Share
from zbcompile.passes.verification.hidden_exchanges import REMEDIES, Trips, hidden_faults
from zbcompile.passes.verification.value_kinds import Kind, PlacementFault, ValueKinds, aten
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram

PLACED: Mapping[str, Kind] = {"replicate": "equal", "partial": "equal", "shard": "differing"}


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh: whether each rank has inputs of its own there, whether the step adds up its losses,
    what a parameter or buffer is along it ("replicate", "partial" or "shard"), and whether a mean of the ranks' means
    must be the mean of all."""

    dimension: str
    own_inputs: bool
    averaged: bool
    placement: Callable[[str], str]
    means: bool = False


@dataclass(frozen=True)
class FaultText:
    """A fault with the parameter, or the other result of the step, that it spoils, and what to do. In the texts {name}
    and {line} stand for what it spoils and for the line of the model, {dimension} for that of the mesh."""

    what: str
    name: str
    node: Node | None
    remedy: str


LOSS = "the loss"
_AT_LINE = "the gradient of {name} is wrong: {line} "
_BEHIND = "what is computed from {name} is wrong: {line} "
_SUM = "Let the backward of what enters there sum the gradient over the ranks."
_ONCE = "Leave out one of the sums; a forward that sums needs a backward that does not, if all ranks have one loss."
_PARTIAL = (
    "Sum it in the model; or, if each rank computes a part, say so: "
    'placements={{"{name}": {{"{dimension}": "partial"}}}}, and it is summed once per step.'
)
_WHOLE = 'If every rank computes all of it, say so: placements={{"{name}": {{"{dimension}": "replicate"}}}}.'
_EQUAL = "Sum or gather it over the ranks first."
_BACK = "What the forward exchanges, the backward must exchange back, and nothing else."
_COUNT = 'Divide by the count of all ranks: all_reduce it first, and use loss_reduction="sum".'
_REMEDIES = {"sums": _ONCE, "exchanges": _BACK, "takes": _BACK, **REMEDIES}  # by the first word of what is wrong


@dataclass
class PlacementProof:
    """The proof for the stages of a model along one axis. `apart` are the operations of a stage whose constants differ
    between the ranks, None if the ranks' graphs cannot be compared; `groups` as for `ValueKinds`; `vocabulary` is what
    follows on the stages, with the same graphs on all ranks along the axis. `unknown` names what the first step
    compares."""

    axis: Axis
    stages: Sequence[GradientFlow]
    apart: Sequence[Collection[Node] | None]
    groups: Mapping[str, str]
    vocabulary: VocabularyProgram | None = None
    values: list[ValueKinds] = field(default_factory=list)
    gradients: dict[int, GradientKinds] = field(default_factory=dict)
    shares: dict[str, set[Share]] = field(default_factory=dict)  # of the uses of a parameter
    wrong: list[FaultText] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        kinds: dict[str, Kind] = {}
        for flow, apart in zip(self.stages, self.apart, strict=True):
            given = {
                slot: self._given(slot, kinds) for slot, _ in flow.inputs if slot.kind not in ("tangent", "constant")
            }
            values = ValueKinds(self.axis.dimension, flow, given, apart, self.groups)
            kinds |= {slot.name: values.of[node] for slot, node in flow.outputs if slot.kind == "activation"}
            self.values.append(values)
        shares: dict[str, Share] = {}
        for index in reversed(range(len(self.values))):
            self.gradients[index] = self._backward(index, shares)
        if self.vocabulary is not None:
            self._follow_shards(self.vocabulary, shares)
        self._judge()

    def _given(self, slot: Slot, kinds: Mapping[str, Kind]) -> Kind:
        if slot.kind in ("parameter", "buffer"):
            return PLACED[self.axis.placement(slot.name)]
        return kinds.get(slot.name, "differing" if self.axis.own_inputs else "equal")

    def _backward(self, index: int, shares: dict[str, Share]) -> GradientKinds:
        """The gradients of a stage, of which those of its inputs are added to `shares`."""
        values = self.values[index]
        outputs = {slot.name or "loss": values.of[node] for slot, node in values.flow.outputs if node in values.of}
        behind = {slot.name: shares.get(slot.name) or self._first(outputs[slot.name]) for _, slot in values.flow.roots}
        found = GradientKinds(values, behind)
        for _, slot in values.flow.leaves:
            uses = found.of_leaf(slot)
            if slot.kind == "input_gradient" and uses:
                shares[slot.name] = uses.pop() if len(uses) == 1 else "unknown"
            elif slot.kind == "gradient":
                self.shares.setdefault(slot.name, set()).update(uses)
        return found

    def _first(self, kind: Kind) -> Share:
        """The share that arrives for what ends the stages: the factor of the loss."""
        if kind == "unknown":
            return "unknown"
        return "own" if kind == "differing" else "part" if self.axis.averaged else "whole"

    def _follow_shards(self, vocabulary: VocabularyProgram, shares: Mapping[str, Share]) -> None:
        """The passes of a sharded output layer, which exchange nothing along the axis: what they compute is equal if
        all that they read is, and gradients of their rows are as whole as those that reach them."""
        values = self.values[-1]
        hidden = dict(values.flow.outputs)[Slot("activation", vocabulary.activation)]
        kinds = {values.of[hidden], *self._read_by_shards(vocabulary)}
        kind: Kind = "unknown" if "unknown" in kinds else "differing" if "differing" in kinds else "equal"
        if not self.axis.averaged:
            self._require_equal(values, hidden, kind, LOSS)
        arriving = {name: self._first(kind) for name in (vocabulary.weight, vocabulary.bias) if name is not None}
        found = list(arriving.items())
        if vocabulary.lookup is not None:
            found.append((vocabulary.lookup.weight, shares.get(vocabulary.lookup.activation, "unknown")))
        for name, share in found:
            of_rows: Share = "part" if share in ("own", "alike") else share if share in ("whole", "part") else "unknown"
            self.shares.setdefault(name, set()).add(of_rows)

    def _read_by_shards(self, vocabulary: VocabularyProgram) -> Iterator[Kind]:
        pieces = [piece for each in vocabulary.pieces for piece in each.values()]
        for slot in {slot for piece in pieces for slot in piece.inputs}:
            if slot.kind == "input":
                yield self._given(slot, {})
            elif slot.kind in ("parameter", "buffer"):
                yield "equal" if self._given(slot, {}) == "equal" else "unknown"
            elif slot.kind == "constant":
                yield "unknown"
        if any(piece.module.graph.find_nodes(op="get_attr") for piece in pieces):
            yield "unknown"

    def _judge(self) -> None:
        for index, values in enumerate(self.values):
            for fault in values.faults:
                self._refuse_fault(index, fault)
        results = [(v, *each) for v in self.values for each in v.flow.outputs if each[0].kind in ("loss", "mutation")]
        for values, slot, node in results:
            self._judge_result(values, slot, node)
        for index, gradients in self.gradients.items():
            for fault in gradients.faults:
                self._refuse_fault(index, fault)
        for name, shares in self.shares.items():
            self._judge_gradient(name, shares)
        trips: dict[str, Trips] = {}
        for index, values in enumerate(self.values):
            for fault in hidden_faults(values, trips):
                self._refuse_fault(index, fault, _BEHIND)

    def _refuse_fault(self, index: int, fault: PlacementFault, begin: str = _AT_LINE) -> None:
        remedy = _REMEDIES.get(fault.what.partition(" ")[0], _SUM)
        self.wrong.append(FaultText(begin + fault.what, self._spoiled(index, fault), fault.node, remedy))

    def _judge_result(self, values: ValueKinds, slot: Slot, node: Node) -> None:
        name = slot.name or LOSS
        if self.axis.means and slot.kind == "loss" and (count := _count_behind(values, node)) is not None:
            what = "{name} is a mean over a count of its own on every rank, and their mean is not that of all: {line}"
            self.wrong.append(FaultText(what, name, count, _COUNT))
        expected = not self.axis.averaged if slot.kind == "loss" else self.axis.placement(name) != "shard"
        if expected and not self.axis.own_inputs:
            self._require_equal(values, node, values.of[node], name)

    def _require_equal(self, values: ValueKinds, node: Node, kind: Kind, name: str) -> None:
        """A result of the step which follows from the value of a node, and is of a kind."""
        if kind == "unknown":
            self.unknown.add("loss" if name == LOSS else name)
        elif kind == "differing":
            what = "{name} must be the same on all ranks, and is not, because of {line}"
            self.wrong.append(FaultText(what, name, _first_differing(values, node), _EQUAL))

    def _judge_gradient(self, name: str, shares: set[Share]) -> None:
        word = self.axis.placement(name)
        if word == "shard" or not shares:
            return
        node = self._reader(name)
        if "unknown" in shares:
            self.unknown.add(name)
        elif len(shares) > 1:
            what = "{name} is used where its gradient is whole on every rank, and where it is a part of a sum: {line}"
            self.wrong.append(FaultText(what, name, node, _SUM))
        elif shares == {"whole"} and word == "partial":
            what = "the gradient of {name} is whole on every rank, and would be summed once more: {line}"
            self.wrong.append(FaultText(what, name, node, _WHOLE))
        elif shares != {"whole"} and word == "replicate":
            what = "every rank computes a part of the gradient of {name}, and nothing sums the parts: {line}"
            self.wrong.append(FaultText(what, name, node, _PARTIAL))

    def _reader(self, name: str) -> Node | None:
        """The first operation, of those whose line is known, that depends on a parameter."""
        slot = Slot("parameter", name)
        queue = [node for flow in self.stages for each, node in flow.inputs if each == slot]
        for node in queue:
            if node.op == "call_function" and origin_of(node) is not None:
                return node
            queue += [user for user in node.users if user not in queue]
        return None

    def _spoiled(self, index: int, fault: PlacementFault) -> str:
        """The parameter that a fault spoils: the first behind its value, or the first that the operation depends on."""
        flow = self.values[index].flow
        if fault.value is not None:
            return next(self._behind(flow, fault.value), "") or next(self._earlier(index), LOSS)
        return _parameter_before(flow, fault.node) or next(self._earlier(index), LOSS)

    def _behind(self, flow: GradientFlow, value: int) -> Iterator[str]:
        """The parameters whose gradients follow from that of a value, the nearest first."""
        steps = {number: step for step in flow.steps for number, _ in step.results}
        leaves = {number: slot.name for number, slot in flow.leaves if slot.kind == "gradient"}
        queue, seen = [value], set[int]()
        for number in queue:
            if number in leaves:
                yield leaves[number]
            following = [each for each, *_ in steps[number].arguments] if number in steps else []
            queue += [n for n in following if n not in seen]
            seen.update(following)

    def _earlier(self, index: int) -> Iterator[str]:
        """The parameters of the stages before, the nearest first."""
        for flow in reversed(self.stages[:index]):
            yield from (slot.name for _, slot in reversed(flow.leaves) if slot.kind == "gradient")


def _first_differing(values: ValueKinds, node: Node) -> Node:
    """Where a differing value entered one that should be equal: the last operation on the way that reads both differing
    and equal values."""
    while True:
        given = [each for each in node.all_input_nodes if each.op == "call_function"]
        differing = [each for each in given if values.of[each] == "differing"]
        equal = [each for each in node.all_input_nodes if values.of[each] in ("equal", "zero") and each in values.data]
        if len(differing) != 1 or equal:
            return node
        node = differing[0]


def _count_behind(values: ValueKinds, loss: Node) -> Node | None:
    """The division of a loss by a number that each rank counts in its own part of the inputs."""
    slots = {node: slot for slot, node in values.flow.inputs}
    node = loss
    while node.op == "call_function":
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.div and len(node.all_input_nodes) == 2:
            count = node.all_input_nodes[1]
            behind = {slots[each].kind for each in nodes_behind([count]) if each in slots}
            if values.of[count] == "differing" and count.meta["val"].ndim == 0 and behind == {"input"}:
                return node
        if packet not in _SCALAR:
            return None
        node = node.all_input_nodes[0]
    return None


_SCALAR = {aten.div, aten.mul, aten.neg, aten.view, aten.clone, aten.squeeze, TO_COPY.overloadpacket}


def _parameter_before(flow: GradientFlow, node: Node) -> str:
    """The nearest parameter that an operation depends on."""
    slots, queue, seen = {each: slot for slot, each in flow.inputs}, [node], set[Node]()
    for each in queue:
        if each in slots and slots[each].kind == "parameter":
            return slots[each].name
        queue += [other for other in each.all_input_nodes if other not in seen]
        seen.update(each.all_input_nodes)
    return ""
