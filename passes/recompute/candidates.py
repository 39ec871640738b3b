"""The values of a stage's forward that the backward reads, and what each costs to keep or recompute."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.rematerialize import can_remake, reads
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import bytes_behind, bytes_moved, is_view, storages_behind, tensors_of
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.machine.roofline import node_seconds
from zbcompile.passes.recompute.budget import Values
from zbcompile.passes.split.joint_graph import Joint, reached_by_gradients
from zbcompile.passes.split.split import forward_nodes, needed_nodes

ATTOSECONDS = 10**18


@dataclass(frozen=True)
class Forward:
    """The parts of a joint graph that matter to its backward.

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
        """Inputs that do not survive F unless they are kept: activations, and buffers that F changes."""
        mutated = {Slot("buffer", slot.name) for slot in self.joint.stage.outputs if slot.kind == "mutation"}
        return frozenset(node for slot, node in self.joint.inputs if slot.kind == "activation" or slot in mutated)

    @cached_property
    def wanted(self) -> frozenset[Node]:
        """Values that the backward reads and that do not depend on an incoming gradient."""
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
    return any(map(is_hinted, forward.made))


def is_hinted(node: Node) -> bool:
    """Whether a node is from a region that the user marked for recomputing."""
    maker: Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return maker.meta.get("recompute") is not None


def list_values(forward: Forward, flops: Mapping[Node, int], policy: str, hardware: Hardware | None = None) -> Values:
    """What each value costs to keep or to recompute, the latter if `policy` ("hints", "selective" or "full") allows it.
    Views cost nothing; values that are always available are left out."""
    known = forward.made | forward.ahead | forward.arriving
    nodes = [node for node in forward.joint.module.graph.nodes if node in known]
    return Values(
        wanted=forward.wanted,
        inputs={n: tuple(known.intersection(() if n in forward.arriving else forward.reads(n))) for n in nodes},
        bytes={n: bytes_behind((n,)) for n in nodes if n not in forward.ahead and _can_keep(n)},
        time=dict.fromkeys(forward.ahead, 0)
        | _times(forward, [n for n in nodes if n in forward.made], flops, policy, hardware),
    )


def _can_keep(node: Node) -> bool:
    """Whether a node is a tensor that does not alias another. Keeping a view would keep its base."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    maker: Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    return not (is_view(maker) and can_remake(maker))


def _times(
    forward: Forward, made: list[Node], flops: Mapping[Node, int], policy: str, hardware: Hardware | None
) -> dict[Node, int]:
    """Attoseconds of each value that may be recomputed, on `hardware` or at the nominal speeds of the device."""
    weights = _weights(forward.joint)

    def allowed(node: Node) -> bool:
        if policy == "full" or is_hinted(node) or is_view(node):
            return True
        return policy == "selective" and not (flops[node] and weights.intersection(node.all_input_nodes))

    again = [node for node in made if can_remake(node) and allowed(node)]
    if hardware is not None:
        return {node: int(ATTOSECONDS * node_seconds(node, flops[node], hardware)) for node in again}
    devices = (t.device.type for _, node in forward.joint.inputs for t in tensors_of(node.meta["val"]))
    machine = hardware_for(next(devices))
    per_flop, per_byte = ATTOSECONDS / machine.peak_of(""), ATTOSECONDS / machine.bandwidth
    return {node: int(flops[node] * per_flop + bytes_moved(node) * per_byte) for node in again}


def _weights(joint: Joint) -> set[Node]:
    """Parameters, and values computed only from parameters, buffers and constants: transposed and cast weights."""
    constant = {node for slot, node in joint.inputs if slot.kind in ("buffer", "constant")}
    found = {node for slot, node in joint.inputs if slot.kind == "parameter"}
    for node in joint.module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) and (found | constant).issuperset(node.all_input_nodes):
            found.add(node)
    return found
