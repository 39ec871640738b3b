"""Which operations inductor would run as one kernel: chains of elementwise operations and
reductions."""

from collections.abc import Sequence, Set

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem, is_view, tensors_of
from zbcompile.passes.graph.storage import storages_read
from zbcompile.passes.torch_private import storage_key

aten = torch.ops.aten
# Kernels of their own: they gather or scatter rows, or sort.
ALONE = frozenset(
    {
        *(
            aten.embedding,
            aten.embedding_dense_backward,
            aten.index_add_,
            aten.index_put,
            aten.sort,
            aten.topk,
        ),
        *(
            aten.max_pool2d_with_indices,
            aten.max_pool2d_with_indices_backward,
            aten.cumsum,
            aten.scatter_add,
        ),
    }
)


def fused_kernels(nodes: Sequence[Node], apart: Set[Node]) -> tuple[list[list[Node]], list[Node]]:
    """The operations of each fused kernel, and those that are kernels of their own: the ones in
    `apart`, and those in `ALONE`.

    An operation joins the kernels that make its inputs if both go through equally many elements and
    no value would have to leave the kernel and come back.
    """
    groups = _Groups()
    others = []
    for node in nodes:
        if is_getitem(node) or is_view(node):
            groups.follow(node)
        elif node in apart or getattr(node.target, "overloadpacket", None) in ALONE:
            groups.start(node, 0)
            others.append(node)
        else:
            groups.place(node, _elements(node))
    return [members for members in groups.members.values() if members], others


def kernel_bytes(kernel: Sequence[Node]) -> int:
    """What a fused kernel reads and writes: values used only inside it do not count."""
    inside = set(kernel)
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for node in kernel:
        own = {
            storage_key(t): int(t.untyped_storage().nbytes()) for t in tensors_of(node.meta["val"])
        }
        taken = {key: int(t.untyped_storage().nbytes()) for key, t in storages_read(node).items()}
        read |= {key: size for key, size in taken.items() if key not in made}
        in_place = any(key in taken for key in own)
        leaves = in_place or any(user not in inside for user in _real_users(node))
        made |= own if leaves else dict.fromkeys(own, 0)
    return sum(read.values()) + sum(made.values())


def _real_users(node: Node) -> list[Node]:
    """Who reads a value, behind its views."""
    found = []
    for user in node.users:
        found += _real_users(user) if is_getitem(user) or is_view(user) else [user]
    return found


def _elements(node: Node) -> int:
    """How many elements a kernel goes through: the larger of what it reads and makes."""
    values = [node.meta["val"], *(a.meta.get("val") for a in node.all_input_nodes)]
    return max((t.numel() for value in values for t in tensors_of(value)), default=0)


class _Groups:
    """Kernels under construction, by number: members, size, and which others each needs (as
    bits)."""

    def __init__(self) -> None:
        self.members: dict[int, list[Node]] = {}
        self.size: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        self.group: dict[Node, int] = {}

    def follow(self, node: Node) -> None:
        """A view is where its source is."""
        if (source := node.all_input_nodes[0]) in self.group:
            self.group[node] = self.group[source]

    def start(self, node: Node, size: int) -> int:
        number = len(self.size)
        self.members[number] = [node] if size else []
        self.size[number], self.group[node] = size, number
        self.needs[number] = self._needed(self._sources(node))
        return number

    def place(self, node: Node, size: int) -> None:
        """Put a node into the newest kernel of its sources that it can join, merged with others
        that fit, or alone."""
        sources = self._sources(node)
        fitting = sorted((g for g in sources if self.size[g] == size and size), reverse=True)
        joined = [
            g
            for g in fitting
            if not any(self.needs[other] >> g & 1 for other in sources if other != g)
        ]
        if not joined:
            self.start(node, size)
            return
        first, *rest = joined
        for other in rest:
            self._merge(first, other)
        self.members[first].append(node)
        self.group[node] = first
        self.needs[first] |= self._needed(sources - {first, *rest})

    def _merge(self, kept: int, other: int) -> None:
        for node, number in self.group.items():
            if number == other:
                self.group[node] = kept
        self.members[kept] = self.members[other] + self.members[kept]
        self.members[other] = []
        self.needs[kept] |= self.needs[other]
        for number, needed in self.needs.items():
            if needed >> other & 1:
                self.needs[number] |= 1 << kept

    def _sources(self, node: Node) -> set[int]:
        return {self.group[a] for a in node.all_input_nodes if a in self.group}

    def _needed(self, sources: set[int]) -> int:
        found = 0
        for source in sources:
            found |= 1 << source | self.needs[source]
        return found
