"""Storages behind the values of a graph: which values alias, and how many bytes are alive."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch import Tensor
from torch.fx import Node

from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.torch_private import is_in_place, storage_key


def storage_sizes(values: Iterable[Any]) -> dict[int, int]:
    """Returns the bytes of the storages behind tensors, or the values of nodes, by their key."""
    return {
        storage_key(tensor): int(tensor.untyped_storage().nbytes())
        for value in values
        for tensor in tensors_of(value)
    }


def storage_bytes(values: Iterable[Any], without: Set[int] = frozenset()) -> int:
    """Returns the bytes of the storages behind tensors or nodes, but for those in `without`.
    Aliases count once."""
    return sum(size for key, size in storage_sizes(values).items() if key not in without)


def storages_behind(nodes: Iterable[Node]) -> set[int]:
    """Returns the keys of the storages behind the values of some nodes."""
    return {storage_key(tensor) for node in nodes for tensor in tensors_of(node)}


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the one after the last."""
    pairs = zip(map(int, tensor.shape), tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else -1
    begin = int(tensor.storage_offset())
    return begin * tensor.itemsize, (begin + int(last) + 1) * tensor.itemsize


def alive_bytes(
    order: Sequence[Node], arriving: Set[int], staying: Set[int], uncounted: Set[int]
) -> list[int]:
    """Returns the bytes that are alive while each node runs.

    Counted are storages that are `arriving` before the first node or allocated on the way, until
    their last use, or to the end if `staying`; never those in `uncounted`.
    """
    behind = {node: storages_behind([node]) for node in order}
    touched = [behind[node].union(*map(behind.__getitem__, node.all_input_nodes)) for node in order]
    sizes = storage_sizes(order)
    last_use = {key: i for i, keys in enumerate(touched) for key in keys}
    alive = set(arriving - uncounted)
    total = sum(sizes.get(key, 0) for key in alive)
    totals = []
    for index, node in enumerate(order):
        allocates = node.op == "call_function" and not is_in_place(node.target)
        allocated = (behind[node] if allocates else set()) - uncounted - alive
        alive |= allocated
        total += sum(sizes[key] for key in allocated)
        totals.append(total)
        dead = {key for key in touched[index] & alive if last_use[key] == index} - staying
        alive -= dead
        total -= sum(sizes[key] for key in dead)
    return totals
