"""What a node computes: its floating-point operations, counted on fake tensors."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from zbcompile.passes.graph.fx import is_getitem, like
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.torch_private import (
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    FUNCTIONAL_COLLECTIVES,
    GROUPED_MM,
    SCALED_GROUPED_MM,
    FakeTensorMode,
    OpOverload,
    is_composite,
)


def _attention_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    *batch, tokens, width = query
    return 2 * math.prod(batch) * tokens * key[-2] * (width + value[-1])


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return (
        _attention_forward(query, key, value) * 5 // 2
    )  # scores recomputed, then the gradients of scores, q, k and v


def _product(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a matrix times a vector, or of two vectors."""
    return 2 * math.prod(one)


def _added_product(added: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(one) * (other[-1] if len(other) > 1 else 1)


def _grouped_product(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    """Rows of one group meet the matrix of their group alone, in whatever dimension the
    groups lie."""
    return 2 * (math.prod(other) * one[-2] if len(one) > len(other) else math.prod(one) * other[-1])


def _grouped_product_backward(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _grouped_product(one, other)


aten = torch.ops.aten
# torch's flop counter (2.11-2.13) has no formula for these.
_MISSING = {
    CPU_FLASH_ATTENTION: _attention_forward,
    CPU_FLASH_ATTENTION_BACKWARD: _attention_backward,
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product),
    **dict.fromkeys((aten.addmv, aten.addbmm, aten.addmm_, aten.baddbmm_), _added_product),
    **dict.fromkeys((GROUPED_MM, SCALED_GROUPED_MM), _grouped_product),
}
# transformers' own operators for experts, which exist once that module is imported.
_OF_TRANSFORMERS = {
    "grouped_mm_fallback": _grouped_product,
    "grouped_mm_fallback_backward": _grouped_product_backward,
}


def count_flops(
    module: GraphModule, mode: FakeTensorMode, counted: Mapping[Node, int] = MappingProxyType({})
) -> dict[Node, int]:
    """Floating-point operations of every call (a multiply-add is two), as torch's counter has them.

    Read off the values in the graph, but for those `counted` already. Only operations that are
    composite or call a graph are run, equal ones once.
    """
    known = _counter().flop_registry
    runs: dict[str, int] = {}
    others = (
        node for node in module.graph.nodes if node.op == "call_function" and node not in counted
    )
    found = {
        n: _flops_of(n, known) if _is_elementary(n) else _flops_by_run(n, mode, runs)
        for n in others
    }
    return {**found, **counted}


def without_formula(module: GraphModule) -> set[str]:
    """The operators of other libraries in a graph whose FLOPs are unknown; their time is estimated
    by their bytes."""
    known = _counter().flop_registry
    packets = {
        getattr(n.target, "overloadpacket", None): n.target
        for n in module.graph.nodes
        if not is_collective(n)
    }
    targets = (
        target for packet, target in packets.items() if packet is not None and packet not in known
    )
    return {
        str(t.overloadpacket)
        for t in targets
        if t.namespace not in ("aten", "prims", *FUNCTIONAL_COLLECTIVES)
    }


def _is_elementary(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if name.startswith(
        "flex_attention"
    ):  # its backward does not run on a CPU, and from 2.13 on it has a formula
        return True
    return is_getitem(node) or (
        isinstance(node.target, OpOverload) and not is_composite(node.target)
    )


def _counter() -> FlopCounterMode:
    known = torch.ops.transformers
    experts = {
        getattr(known, name): count
        for name, count in _OF_TRANSFORMERS.items()
        if hasattr(known, name)
    }
    return FlopCounterMode(display=False, custom_mapping={**_MISSING, **experts})


def _flops_of(node: Node, formulas: Mapping[Any, Callable[..., int]]) -> int:
    """FLOPs of a node by its formula, also one registered for a custom operator; 0 without one."""
    formula = formulas.get(getattr(node.target, "overloadpacket", node.target))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _flops_by_run(node: Node, mode: FakeTensorMode, runs: dict[str, int]) -> int:
    """By a run on fake tensors; `runs` has the counts of the calls so far."""
    key = str((node.target, map_arg((node.args, node.kwargs), _kind)))
    if key not in runs:
        with mode, torch.no_grad(), _counter() as counter:
            args, kwargs = map_arg((node.args, node.kwargs), _example)
            node.target(*args, **kwargs)  # type: ignore[operator]
        runs[key] = counter.get_total_flops()
    return runs[key]


def _kind(source: Node) -> Any:
    value = source.meta.get("val", source)
    return (*value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _example(source: Node) -> Any:
    """A graph that is called, or an uninitialised tensor."""
    if source.op == "get_attr":
        return getattr(source.graph.owning_module, str(source.target))
    value = source.meta["val"]
    return like(value) if isinstance(value, torch.Tensor) else value
