"""What a node computes: its floating-point operations, counted on fake tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from zbcompile.passes.graph.fx import is_getitem, like
from zbcompile.passes.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_PRODUCTS,
    FakeTensorMode,
    OpOverload,
    is_composite,
)


def _attention_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    *batch, tokens, width = query
    count = 1
    for size in batch:
        count *= size
    return 2 * count * tokens * key[-2] * (width + value[-1])


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return _attention_forward(query, key, value) * 5 // 2  # scores recomputed, then the gradients of scores, q, k and v


def _product(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    """Of a matrix and a vector, or of two vectors."""
    return 2 * math.prod(one)


def _added_product(added: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(one) * (other[-1] if len(other) > 1 else 1)


def _grouped_product(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    """Rows of one group meet the matrix of their group alone, in whatever dimension the groups lie."""
    return 2 * (math.prod(other) * one[-2] if len(one) > len(other) else math.prod(one) * other[-1])


def _grouped_product_backward(one: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _grouped_product(one, other)


aten = torch.ops.aten
# torch's flop counter (2.11-2.13) has no formula for these.
_MISSING = {
    CPU_ATTENTION: _attention_forward,
    CPU_ATTENTION_BACKWARD: _attention_backward,
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product),
    **dict.fromkeys((aten.addmv, aten.addbmm), _added_product),
    **dict.fromkeys(GROUPED_PRODUCTS, _grouped_product),
}
# transformers' own operators for experts, which exist once that module is imported.
_OF_TRANSFORMERS = {"grouped_mm_fallback": _grouped_product, "grouped_mm_fallback_backward": _grouped_product_backward}


def count_flops(module: GraphModule, mode: FakeTensorMode) -> dict[Node, int]:
    """Floating-point operations of every call (a multiply-add is two), as torch's counter has them.

    Read off the values in the graph, without running it, unless an operation is composite or calls a graph.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    if all(map(_is_elementary, calls)):
        formulas = _counter().flop_registry  # with those registered for custom operators
        return {node: _flops_of(node, formulas) for node in calls}
    return count_flops_by_run(module, mode)


def _is_elementary(node: Node) -> bool:
    return is_getitem(node) or (isinstance(node.target, OpOverload) and not is_composite(node.target))


def _counter() -> FlopCounterMode:
    known = torch.ops.transformers
    experts = {getattr(known, name): count for name, count in _OF_TRANSFORMERS.items() if hasattr(known, name)}
    return FlopCounterMode(display=False, custom_mapping={**_MISSING, **experts})


def _flops_of(node: Node, formulas: Mapping[Any, Callable[..., int]]) -> int:
    formula = formulas.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


class _Flops(Interpreter):
    def __init__(self, module: GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(module)
        self.counter = counter
        self.counts: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        if n.op == "call_function":
            self.counts[n] = self.counter.get_total_flops() - before
        return value


def count_flops_by_run(module: GraphModule, mode: FakeTensorMode) -> dict[Node, int]:
    """The same by one run on fake tensors."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad(), _counter() as counter:
        inputs = [like(value) if isinstance(value, torch.Tensor) else value for value in values]
        runner = _Flops(module, counter)
        runner.run(*inputs, enable_io_processing=False)
    return runner.counts
