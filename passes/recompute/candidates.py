"""The values of a stage's forward that the backward reads: what each costs to keep or recompute, which of them may run
a second time with the same bits, and how they are copied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import is_getitem, is_random
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import bytes_behind, bytes_moved, is_view, storages_behind, tensors_of
from zbcompile.passes.hardware.hardware import hardware_for
from zbcompile.passes.recompute.budget import Values
from zbcompile.passes.split.joint_graph import Joint, reached_by_gradients
from zbcompile.passes.split.split import forward_nodes, needed_nodes
from zbcompile.passes.torch_private import OpOverload, is_in_place

aten = torch.ops.aten
_ATTOSECONDS = 10**18
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Forward:
    """A joint graph seen from its backward.

    `made` is what F computes; `ahead` are operations of the backward that no incoming gradient reaches (a detach of
    what F kept), which run once, at any time; `backward` is everything else that the gradients need.
    """

    joint: Joint
    made: frozenset[Node]
    ahead: frozenset[Node]
    backward: frozenset[Node]

    @classmethod
    def of(cls, joint: Joint) -> "Forward":
        made = frozenset(forward_nodes(joint))
        rest = needed_nodes(joint, lambda slot: slot not in joint.stage.outputs) - made
        reached = reached_by_gradients(joint)
        return cls(joint, made, frozenset(rest - reached), frozenset(rest & reached))

    @cached_property
    def arriving(self) -> frozenset[Node]:
        """Inputs that are gone after F unless they are kept: activations, and buffers that F changes."""
        mutated = {Slot("buffer", slot.name) for slot in self.joint.stage.outputs if slot.kind == "mutation"}
        return frozenset(node for slot, node in self.joint.inputs if slot.kind == "activation" or slot in mutated)

    @cached_property
    def wanted(self) -> frozenset[Node]:
        """Values without an incoming gradient that the backward proper reads."""
        read = {argument for node in self.backward for argument in node.all_input_nodes}
        read |= {node for slot, node in self.joint.outputs if slot.kind in ("gradient", "input_gradient")}
        return frozenset(read & (self.made | self.ahead | self.arriving))

    def reads(self, node: Node) -> list[Node]:
        """The nodes that computing `node` in the backward reads."""
        return reads(node) if node in self.made else node.all_input_nodes

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that wait between F and B, by storage (`Crossing.kept` after the split)."""
        read = self.wanted.union(*(node.all_input_nodes for node in self.ahead))
        resident = storages_behind(node for _, node in self.joint.inputs if node not in self.arriving)
        return bytes_behind(read & (self.made | self.arriving), resident)


def has_hints(forward: Forward) -> bool:
    """Whether any operation of the forward is from a region that the user marked for recomputing."""
    return any(map(_hinted, forward.made))


def _hinted(node: Node) -> bool:
    maker: Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return maker.meta.get("recompute") is not None


def list_values(forward: Forward, flops: Mapping[Node, int], policy: str) -> Values:
    """What each value costs to keep or to recompute, the latter if `policy` ("hints", "selective" or "full") allows it.
    Views cost nothing; values that are always available are left out."""
    known = forward.made | forward.ahead | forward.arriving
    nodes = [node for node in forward.joint.module.graph.nodes if node in known]
    return Values(
        wanted=forward.wanted,
        inputs={n: tuple(known.intersection(() if n in forward.arriving else forward.reads(n))) for n in nodes},
        bytes={n: bytes_behind((n,)) for n in nodes if n not in forward.ahead and _can_keep(n)},
        time=dict.fromkeys(forward.ahead, 0) | _times(forward, [n for n in nodes if n in forward.made], flops, policy),
    )


def _can_keep(node: Node) -> bool:
    """Whether a node is a tensor that does not alias another. Keeping a view would keep its base."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    maker: Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return not (is_view(maker) and can_remake(maker))


def _times(forward: Forward, made: list[Node], flops: Mapping[Node, int], policy: str) -> dict[Node, int]:
    """Attoseconds that each value takes which may be recomputed."""
    weights = _weights(forward.joint)

    def allowed(node: Node) -> bool:
        if policy == "full" or _hinted(node) or is_view(node):
            return True
        return policy == "selective" and not (flops[node] and weights.intersection(node.all_input_nodes))

    devices = (t.device.type for _, node in forward.joint.inputs for t in tensors_of(node.meta["val"]))
    machine = hardware_for(next(devices))
    per_flop, per_byte = _ATTOSECONDS / machine.peak_of(""), _ATTOSECONDS / machine.bandwidth
    again = [node for node in made if can_remake(node) and allowed(node)]
    return {node: int(flops[node] * per_flop + bytes_moved(node) * per_byte) for node in again}


def _weights(joint: Joint) -> set[Node]:
    """Parameters, and values computed only from parameters, buffers and constants: transposed and cast weights."""
    constant = {node for slot, node in joint.inputs if slot.kind in ("buffer", "constant")}
    found = {node for slot, node in joint.inputs if slot.kind == "parameter"}
    for node in joint.module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) and (found | constant).issuperset(node.all_input_nodes):
            found.add(node)
    return found


def can_remake(node: Node) -> bool:
    """Whether `node` can be recomputed from its inputs (`reads`) with the same bits.

    An operation cannot if it draws random numbers, writes in place or may differ from run to run, or if it belongs to
    another library, since nothing is known of it.
    """
    if is_getitem(node):
        return not is_random(node.args[0]) or _mask(node) is not None  # type: ignore[arg-type]
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    unsafe = is_in_place(target) or is_random(node) or torch.Tag.nondeterministic_bitwise in target.tags
    return not unsafe and target.overloadpacket.__name__ not in _UNINITIALISED


def reads(node: Node) -> list[Node]:
    """The nodes that recomputing `node` reads: for a dropout's result its input and mask, otherwise its inputs."""
    mask = _mask(node)
    return node.all_input_nodes if mask is None else [node.args[0].args[0], mask]  # type: ignore[union-attr, list-item]


def remake(graph: Graph, node: Node, value: Callable[[Node], Node]) -> Node:
    """Append a copy of `node` to `graph`; `value` maps what it reads."""
    mask = _mask(node)
    return graph.node_copy(node, value) if mask is None else _drop_again(graph, node, mask, value)


def _mask(node: Node) -> Node | None:
    """For the result of a dropout, the node of its mask, if the graph has one."""
    if not is_getitem(node) or node.args[1] != 0 or node.args[0].target is not aten.native_dropout.default:  # type: ignore
        return None
    return next((user for user in node.args[0].users if is_getitem(user) and user.args[1] == 1), None)  # type: ignore


def _drop_again(graph: Graph, node: Node, mask: Node, value: Callable[[Node], Node]) -> Node:
    """(input * mask) * 1/(1 - p): what torch's kernel computes, in its order (aten/native/Dropout.cpp, 2.11-2.13)."""
    dropped, probability = node.args[0].args[:2]  # type: ignore[union-attr]
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)  # type: ignore[operator]
    masked = graph.call_function(aten.mul.Tensor, (value(dropped), value(mask)))  # type: ignore[arg-type]
    scaled = graph.call_function(aten.mul.Tensor, (masked, scale))
    masked.meta, scaled.meta = dict(node.meta), dict(node.meta)
    return scaled
