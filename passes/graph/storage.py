"""The storages behind the values of a graph: which values alias, their bytes, and the bytes that an
operation moves."""

from collections.abc import Iterable, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.torch_private import FakeTensorMode, fake_of, is_in_place, storage_key


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value."""
    return [
        v
        for v in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(v, torch.Tensor)
    ]


def moved_value(value: Any, storages: MutableMapping[int, Any], mode: FakeTensorMode) -> Any:
    """A fake value like `value`, in `mode`, on the storages that `storages` has for its own (by
    `storage_key`), or on new ones; conjugated and negated lazily it is not."""
    if isinstance(value, tuple | list):
        return (list if isinstance(value, list) else tuple)(
            moved_value(each, storages, mode) for each in value
        )
    if not isinstance(value, torch.Tensor):
        return value
    key = storage_key(value)
    if key not in storages:
        storages[key] = torch.UntypedStorage(int(value.untyped_storage().nbytes()), device="meta")
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    return fake_of(empty, mode, value.device).requires_grad_(value.requires_grad)


def content_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in order, on whatever device."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def storage_bytes(values: Iterable[torch.Tensor], without: Set[int] = frozenset()) -> int:
    """Bytes of the distinct storages behind `values`: aliases count once, storages in `without` not
    at all."""
    storages = {storage_key(v): int(v.untyped_storage().nbytes()) for v in values}
    return sum(size for key, size in storages.items() if key not in without)


def storages_behind(nodes: Iterable[Node]) -> set[int]:
    """The storages behind the values of some nodes."""
    return {storage_key(t) for node in nodes for t in tensors_of(node.meta.get("val"))}


def alive_bytes(
    order: Sequence[Node], arriving: Set[int], staying: Set[int], uncounted: Set[int]
) -> list[int]:
    """The bytes alive while each of the nodes runs: of storages that are `arriving` before the
    first one or made on the way, each until its last use, or to the end if `staying`; never those
    in `uncounted`."""
    touched = [storages_behind((node, *node.all_input_nodes)) for node in order]
    values = (
        t
        for node in order
        for each in (node, *node.all_input_nodes)
        for t in tensors_of(each.meta.get("val"))
    )
    sizes = {storage_key(t): int(t.untyped_storage().nbytes()) for t in values}
    last_use = {key: i for i, keys in enumerate(touched) for key in keys}
    alive = set(arriving - uncounted)
    now = sum(sizes.get(key, 0) for key in alive)
    found = []
    for index, node in enumerate(order):
        makes = node.op == "call_function" and not is_in_place(node.target)
        made = (storages_behind([node]) if makes else set()) - uncounted - alive
        alive |= made
        now += sum(sizes[key] for key in made)
        found.append(now)
        dead = {key for key in touched[index] & alive if last_use[key] == index} - staying
        alive -= dead
        now -= sum(sizes[key] for key in dead)
    return found


def storages_read(node: Node) -> dict[int, torch.Tensor]:
    """The storages that a node reads, each with one tensor that lies in it."""
    return {
        storage_key(t): t
        for argument in node.all_input_nodes
        for t in tensors_of(argument.meta.get("val"))
    }


def bytes_moved(node: Node) -> int:
    """Bytes read and written: none by a view; an in-place operation reads and writes the tensor
    that it changes."""
    written = tensors_of(node.meta.get("val"))
    return (
        0
        if not written or is_view(node)
        else storage_bytes(storages_read(node).values()) + storage_bytes(written)
    )


def is_view(node: Node) -> bool:
    """Whether a node's result aliases its input and the node does not change it."""
    if node.op != "call_function" or is_in_place(node.target):
        return False
    reads = storages_read(node)
    return any(storage_key(t) in reads for t in tensors_of(node.meta.get("val")))
