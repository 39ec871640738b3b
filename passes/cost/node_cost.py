"""The cost of operations: FLOPs and bytes, read off the values in the graph, and seconds on a
machine."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, shape_wrapper

from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.graph.fx import is_view, operator_name, tensors_of
from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.torch_private import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    FUNCTIONAL_COLLECTIVES,
    GROUPED_MM,
    SCALED_GROUPED_MM,
    OpOverload,
)

aten = torch.ops.aten


def graph_seconds(graph: Graph, hardware: Hardware) -> float:
    """Returns the seconds of one run of a graph, without its collectives."""
    return sum(node_seconds(node, hardware) for node in graph.nodes)


def node_seconds(node: Node, hardware: Hardware) -> float:
    """Returns the seconds of an operation: its launch, and the longer of its arithmetic and its
    memory traffic; 0 for views and collectives."""
    if node.op != "call_function" or is_collective(node) or is_wait(node):
        return 0.0
    if not (bytes_ := node_bytes(node)):
        return 0.0
    arithmetic = 0.0
    if flops := node_flops(node):
        is_attention = "attention" in operator_name(node)
        efficiency = hardware.attention_efficiency if is_attention else hardware.product_efficiency
        arithmetic = flops / (hardware.peak_of(_dtype_of(node)) * efficiency)
    traffic = bytes_ / (hardware.bandwidth * hardware.bandwidth_efficiency)
    return hardware.launch + max(arithmetic, traffic)


def node_flops(node: Node) -> int:
    """Returns the floating-point operations of a call; a multiply-add counts as two."""
    formula = _formula(getattr(node.target, "overloadpacket", node.target))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def node_bytes(node: Node) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views."""
    if is_view(node) or operator_name(node) == "getitem":
        return 0
    tensors = [*tensors_of(node)]
    for source in node.all_input_nodes:
        tensors += tensors_of(source)
    return sum(  # a broadcast tensor has fewer bytes than elements
        min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))
        for tensor in tensors
    )


def operators_without_formula(graph: Graph) -> set[str]:
    """Returns the operators of other libraries whose FLOPs are unknown; bytes alone count."""
    packets = {node.target.overloadpacket for node in graph.nodes if is_custom(node)}
    return {str(packet) for packet in packets if _formula(packet) is None}


def is_custom(node: Node) -> bool:
    """Returns True for a call of an operator of another library."""
    if not isinstance(node.target, OpOverload) or is_collective(node):
        return False
    return node.target.namespace not in ("aten", "prims", *FUNCTIONAL_COLLECTIVES)


def _dtype_of(node: Node) -> str:
    """Returns the name of the dtype of the first floating-point tensor that a node reads."""
    read = (tensor for source in node.all_input_nodes for tensor in tensors_of(source))
    dtypes = (str(tensor.dtype) for tensor in read if tensor.dtype.is_floating_point)
    return next(dtypes, "").removeprefix("torch.")


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


def _grouped_product_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _grouped_product(*args)


# torch's table (2.11 to 2.13) has no formula for these.
_MISSING: dict[Any, Callable[..., int]] = {
    CPU_FLASH_ATTENTION: _attention,
    CPU_FLASH_ATTENTION_BACKWARD: _attention_backward,
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product),
    **dict.fromkeys((aten.addmv, aten.addbmm, aten.baddbmm), _added_product),
    **dict.fromkeys((aten.addmm_, aten.baddbmm_), _added_product),
    **dict.fromkeys((GROUPED_MM, SCALED_GROUPED_MM), _grouped_product),
}
# transformers' operators for experts, by name: they exist once that module is imported.
_OF_TRANSFORMERS = {
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward,
}


def _formula(packet: Any) -> Callable[..., Any] | None:
    """Returns a function from the arguments and the result of an operator to its FLOPs."""
    missing = _MISSING.get(packet) or _OF_TRANSFORMERS.get(str(packet))
    return shape_wrapper(missing) if missing is not None else flop_registry.get(packet)
