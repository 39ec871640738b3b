"""The memory behind the values of a graph: which share it, how much it is, and how much of it an operation moves."""

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.torch_private import storage_key


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value."""
    return [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, torch.Tensor)]


def storage_bytes(values: Iterable[torch.Tensor], without: Set[int] = frozenset()) -> int:
    """Bytes of the distinct storages behind `values`, views counted once, those in `without` not at all."""
    storages = {storage_key(v): v.untyped_storage().nbytes() for v in values}
    return sum(size for key, size in storages.items() if key not in without)


def bytes_moved(node: Node) -> int:
    """Bytes read and written; 0 for a node whose result shares its input's storage (a view)."""
    reads = {storage_key(t): t for arg in node.all_input_nodes for t in tensors_of(arg.meta.get("val"))}
    writes = {storage_key(t): t for t in tensors_of(node.meta.get("val"))}
    if not writes or set(writes) & set(reads):
        return 0
    return sum(t.untyped_storage().nbytes() for t in (*reads.values(), *writes.values()))


def is_view(node: Node) -> bool:
    """Whether a node's result shares its input's storage."""
    return node.op == "call_function" and bool(tensors_of(node.meta.get("val"))) and bytes_moved(node) == 0
