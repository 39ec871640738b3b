"""The bytes that wait between the passes of a stage."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import bytes_behind, storages_behind, storages_read, tensors_of
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.subgraphs import Assignment
from zbcompile.passes.torch_private import storage_key

RESIDENT = ("parameter", "buffer", "constant", "input")
LOSS = Slot("tangent", "loss")  # the same factor for every microbatch


@dataclass(frozen=True)
class Crossing:
    """What waits between the passes, in bytes counted by storage (views once; parameters and user inputs not at all).

    `kept` is everything alive between F and B, `residue` everything alive between B and W; the other three split them
    by the pass that made them (or in which they arrived) and the pass that needs them.
    """

    forward_to_backward: int
    forward_to_weight: int
    backward_to_weight: int
    kept: int
    residue: int


def resident_storages(joint: Joint) -> set[int]:
    """Storages that live longer than a step. Not buffers that F changes: F keeps a copy of the value that it read."""
    changed = {slot.name for slot in joint.stage.outputs if slot.kind == "mutation"}
    return storages_behind(node for slot, node in joint.inputs if is_resident(slot, changed))


def is_resident(slot: Slot, changed: Set[str]) -> bool:
    """Whether an input lives longer than a step; `changed` are the buffers that F changes."""
    if slot.kind == "buffer":
        return slot.name not in changed
    return slot.kind in RESIDENT or slot == LOSS


def crossing_of(assignment: Assignment) -> Crossing:
    """Count what F and B keep under an assignment."""
    joint = assignment.joint
    free = resident_storages(joint)
    tangents = {node for slot, node in joint.inputs if slot.kind == "tangent"}
    for_backward, for_weight = assignment.arriving("B"), assignment.arriving("W")
    made_later = [n for n in for_weight if n in tangents or (n not in assignment.nodes["F"] and n.op != "placeholder")]
    made_before = [n for n in for_weight if n not in made_later]
    before_backward = [n for n in for_backward if n not in tangents]
    return Crossing(
        forward_to_backward=bytes_behind(before_backward, free),
        forward_to_weight=bytes_behind(made_before, free),
        backward_to_weight=bytes_behind(made_later, free),
        kept=bytes_behind({*before_backward, *made_before}, free),
        residue=bytes_behind(for_weight, free),
    )


@dataclass(frozen=True)
class Storages:
    """The storages behind the values of a joint graph.

    `maker[key]` is the operation or placeholder that made a storage, `readers[key]` the operations that read it, both
    seen through views; `bytes[key]` is 0 for what is resident. `views` are the operations that make no storage.
    """

    maker: Mapping[int, Node]
    readers: Mapping[int, tuple[Node, ...]]
    bytes: Mapping[int, int]
    views: frozenset[Node]


def keys_of(node: Node) -> set[int]:
    """The storages of a node's value."""
    return storages_behind((node,))


def find_storages(joint: Joint) -> Storages:
    """Follow every storage of `joint` from its maker to its readers."""
    maker: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    sizes: dict[int, int] = {}
    views: set[Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "output":
            continue
        new = {key for key in keys_of(node) if key not in maker}
        maker |= dict.fromkeys(new, node)
        sizes |= {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(node.meta.get("val"))}
        if node.op == "call_function" and keys_of(node) and not new:
            views.add(node)
        elif node.op == "call_function":
            for key in storages_read(node):
                readers.setdefault(key, []).append(node)
    sizes |= dict.fromkeys(resident_storages(joint), 0)
    return Storages(maker, {key: tuple(nodes) for key, nodes in readers.items()}, sizes, frozenset(views))
