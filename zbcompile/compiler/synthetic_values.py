"""Synthetic values to time operations on: random numbers, and indices that reach everything that they index.

Indices that are all equal would read one row again and again, and leave all experts but one without work.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import argument_of
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.torch_private import OpOverload

aten = torch.ops.aten
# Arguments of operators: what is indexed, the index, and the dimension or the argument that names it.
_INDEXED: dict[Any, tuple[str, str, int | str]] = {
    aten.embedding: ("weight", "indices", 0),
    **dict.fromkeys((aten.cross_entropy_loss, aten.nll_loss_nd), ("self", "target", 1)),
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss_backward), ("self", "target", 1)),
    **dict.fromkeys((aten.gather, aten.index_select, aten.index_add), ("self", "index", "dim")),
    **dict.fromkeys((aten.scatter, aten.scatter_add), ("self", "index", "dim")),
}
_COUNTED: dict[Any, tuple[str, str]] = {
    aten.embedding_dense_backward: ("indices", "num_weights"),
    aten.one_hot: ("self", "num_classes"),
}
_BY_POSITION = (aten.index, aten.index_put)  # the first index is of dimension 0, and so on
Read = tuple[Node, Node]  # a value, or a view of it, and an operation that reads it


def values_like(node: Node, reads: Iterable[Read] | None = None) -> Any:
    """A value of the form that `node` has, as `reads` (default: all of its graph) can take it."""
    value = torch.fx.node.map_aggregate(node.meta["val"], synthetic)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64) or not value.numel():
        return value
    found = list(_reads_of(node) if reads is None else reads)
    rows = [count for name, reader in found if (count := _grouped_rows(name, reader))]
    if rows:  # experts that get equally many rows
        return value.copy_(torch.arange(1, value.numel() + 1).view(value.shape) * min(rows) // value.numel())
    limits = [limit for name, reader in found if (limit := _indexed_length(name, reader))]
    return value.copy_(torch.randint(min(limits), value.shape)) if limits else value


def synthetic(value: Any) -> Any:
    """Random numbers between 0 and 1; integers are 0 and masks let everything through."""
    if not isinstance(value, torch.Tensor):
        return value
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size)
    storage = torch.zeros(reach, dtype=value.dtype, device=value.device)
    if value.dtype is torch.bool:
        storage.fill_(True)
    elif value.is_floating_point() or value.is_complex():
        storage = torch.rand(reach, dtype=value.dtype, device=value.device)
    return storage.as_strided(value.shape, value.stride()).detach()


def _reads_of(node: Node) -> Iterator[Read]:
    for user in node.users:
        if is_view(user):
            yield from _reads_of(user)
        else:
            yield node, user


def _grouped_rows(value: Node, reader: Node) -> int:
    """The number of rows that a grouped product divides at the offsets `value`; 0 if it does not."""
    if not isinstance(reader.target, OpOverload) or argument_of(reader, "offs", None) is not value:
        return 0
    one, other = (argument.meta["val"].shape for argument in reader.args[:2])  # type: ignore[union-attr]
    return int(other[-1] if len(one) == 3 else one[0] if len(other) == 3 else other[0])


def _indexed_length(value: Node, reader: Node) -> int:
    """How long the dimension is that `reader` indexes by `value`; 0 if it does not, as far as is known."""
    packet = getattr(reader.target, "overloadpacket", None)
    if packet in _INDEXED:
        table, index, dim = _INDEXED[packet]
        shape = argument_of(reader, table, None).meta["val"].shape
        if argument_of(reader, index, None) is value:
            at = dim if isinstance(dim, int) else argument_of(reader, dim, 0)
            return int(shape[min(at, len(shape) - 1)])
    elif packet in _COUNTED:
        index, count = _COUNTED[packet]
        return max(int(argument_of(reader, count, 0)), 0) if argument_of(reader, index, None) is value else 0
    elif packet in _BY_POSITION:
        indices = argument_of(reader, "indices", ())
        whole = all(given is None or given.meta["val"].dtype is not torch.bool for given in indices)
        if value in indices and whole:
            return int(reader.args[0].meta["val"].shape[indices.index(value)])  # type: ignore[union-attr]
    return 0
