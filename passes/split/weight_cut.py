"""Decides what W computes, by an exact minimum cut over bytes.

The dependency closure gives W everything that no input gradient needs. That keeps more than it must if a cheap
operation of W reads large values that nothing else in W reads: the gradient of a hand-written norm's weight sums
g * x_hat, and drags both along; computed in B, its result of one row is all that waits.

Every operation is on one of two sides: before W, or in W. A storage is paid for when it is made before W and read in W
(it waits between B and W), and once more when it is made in F and B does not need it anyway (it waits between F and B).
Both prices are those of a cut in a network, so the least sum is a minimum cut. Of equal sums, the cut is
chosen whose changed operations move the fewest bytes, so nothing changes without a gain.
"""

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.min_cut import SINK, SOURCE, Network
from zbcompile.passes.graph.storage import bytes_moved, storages_read
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.saved_bytes import Storages, find_storages, keys_of
from zbcompile.passes.split.subgraphs import Assignment
from zbcompile.passes.torch_private import MEMORY_BOUND, OpOverload

IN_W, BEFORE = SOURCE, SINK


def is_cheap(node: Node) -> bool:
    """Whether an operation is bound by memory: pointwise operations, reductions, copies, softmax and norms.

    Contractions are not, nor are scatters (the gradient of an embedding), nor operations unknown to torch.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_random(node):
        return False
    tagged = {torch.Tag.pointwise, torch.Tag.reduction} & set(node.target.tags)
    return bool(tagged) or node.target.overloadpacket in MEMORY_BOUND


def cut_weight(plain: Assignment) -> frozenset[Node]:
    """The operations left for W that B computes for it at the cheapest sides, given F's nodes and what B must
    compute."""
    network = _WeightNetwork(plain)
    return frozenset(network.movable - network.solve())


class _WeightNetwork:
    """The network whose minimum cut is wanted.

    An edge without a capacity means that its head is in W if its tail is. An edge with a capacity costs that much if
    its tail is in W and its head is not.
    """

    def __init__(self, plain: Assignment) -> None:
        joint, forward, backward, weight = plain.joint, *(plain.nodes[name] for name in "FBW")
        self.storages: Storages = find_storages(joint)
        self.forward = forward
        self.waiting_anyway = _read_outside_w(joint, backward)
        self.arrives = {node for slot, node in joint.inputs if slot.kind == "activation"}
        self.gradients = {key for slot, node in joint.outputs if slot.kind == "gradient" for key in keys_of(node)}
        self.later = set(weight) - self.storages.views
        self.movable = {node for node in self.later if is_cheap(node)}
        self.work = {node: bytes_moved(node) + 1 for node in self.movable}
        self.scale = 1 + sum(self.work.values())
        self.network = Network()

    def solve(self) -> set[Node]:
        """The operations on W's side of a minimum cut, the smallest such side."""
        self._add_operations()
        for key in self.storages.maker:
            self._add_storage(key)
        return {node for node in self.network.source_side() if isinstance(node, Node)}

    def _add_operations(self) -> None:
        for node in self.later:
            self.network.connect(IN_W, node, self.work.get(node))

    def _add_storage(self, key: int) -> None:
        maker, readers = self.storages.maker[key], self.storages.readers.get(key, ())
        readers = tuple(node for node in readers if node in self.later)
        wanted: list[Any] = [*readers, *([IN_W] if key in self.gradients else [])]
        if maker in self.later:
            for node in readers:
                self.network.connect(maker, node)
        size = self.storages.bytes[key] * self.scale
        if not size or not wanted:
            return
        start = maker if maker in self.later else BEFORE
        # between F and B, what W itself reads is kept whichever side the readers are on
        kept = not readers and key not in self.waiting_anyway and (maker in self.forward or maker in self.arrives)
        self.network.connect(("waits", key), start, 2 * size if kept else size)
        for node in wanted:
            self.network.connect(node, ("waits", key))


def _read_outside_w(joint: Joint, backward: Set[Node]) -> set[int]:
    """The storages that B needs in any case."""
    leaving = {key for slot, node in joint.outputs if slot.kind == "input_gradient" for key in keys_of(node)}
    return leaving.union(*(storages_read(node) for node in backward))
