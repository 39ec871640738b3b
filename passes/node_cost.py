"""The cost of a node: floating-point operations and bytes, read off the values in the graph."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from zbcompile.passes.graph.fx import is_view, tensors_of
from zbcompile.passes.torch_private import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    GROUPED_MM,
    pytree,
)

aten = torch.ops.aten
FLOPS_PER_BYTE = 8  # a byte of memory traffic costs as much as this many FLOPs


def node_cost(node: Node) -> float:
    """Returns the cost of an operation in FLOPs: its own, or what its memory traffic is worth."""
    return max(node_flops(node), FLOPS_PER_BYTE * bytes_moved(node))


def node_flops(node: Node) -> int:
    """Returns the floating-point operations of a call; a multiply-add counts as two."""
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = _MISSING.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    if packet in _MISSING:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda value: value.shape, (args, kwargs))
        return int(formula(*args, **kwargs))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def bytes_moved(node: Node) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views."""
    if is_view(node) or getattr(node.target, "__name__", "") == "getitem":
        return 0
    tensors = [*tensors_of(node)]
    for source in node.all_input_nodes:
        tensors += tensors_of(source)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    *batch, tokens, width = query
    return 2 * math.prod(batch) * tokens * key[-2] * (width + value[-1])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> int:
    return _attention(query, key, value) * 5 // 2


def _product(first: Any, second: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(first)


def _added_product(added: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(first) * (second[-1] if len(second) > 1 else 1)


def _grouped_product(first: Any, second: Any, *args: Any, **kwargs: Any) -> int:
    if len(first) > len(second):
        return int(2 * math.prod(second) * first[-2])
    return int(2 * math.prod(first) * second[-1])


# torch's table (2.11 to 2.13) has no formula for these.
_MISSING: dict[Any, Callable[..., int]] = {
    CPU_FLASH_ATTENTION: _attention,
    CPU_FLASH_ATTENTION_BACKWARD: _attention_backward,
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product),
    **dict.fromkeys((aten.addmv, aten.addbmm, aten.baddbmm), _added_product),
    **dict.fromkeys((aten.addmm_, aten.baddbmm_), _added_product),
    GROUPED_MM: _grouped_product,
}
