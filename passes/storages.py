"""Values as storages: which operation made each, which operations read it, what must not be counted."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.costs import storage_key_of, tensors_of
from zbcompile.passes.crossing import resident_storages
from zbcompile.passes.joint import Joint


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

    def of(self, node: Node) -> set[int]:
        """The storages of a node's value."""
        return keys_of(node)

    def made_by(self, node: Node) -> list[int]:
        """The storages that a node makes."""
        return [key for key in sorted(keys_of(node)) if self.maker[key] is node]


def keys_of(node: Node) -> set[int]:
    """The storages of a node's value."""
    return {storage_key_of(t) for t in tensors_of(node.meta.get("val"))}


def read_by(node: Node) -> set[int]:
    """The storages that a node reads."""
    return {key for argument in node.all_input_nodes for key in keys_of(argument)}


def find_storages(joint: Joint) -> Storages:
    """Follow every storage of `joint` from its maker to its readers."""
    maker: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    sizes: dict[int, int] = {}
    views: set[Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "output":
            continue
        new = keys_of(node) - set(maker)
        maker |= dict.fromkeys(new, node)
        sizes |= {storage_key_of(t): t.untyped_storage().nbytes() for t in tensors_of(node.meta.get("val"))}
        if node.op == "call_function" and keys_of(node) and not new:
            views.add(node)
        elif node.op == "call_function":
            for key in read_by(node):
                readers.setdefault(key, []).append(node)
    sizes |= dict.fromkeys(resident_storages(joint), 0)
    return Storages(maker, {key: tuple(nodes) for key, nodes in readers.items()}, sizes, frozenset(views))
