"""Convolution backward: cut by output mask into the gradient of the input (B) and those of weight and bias (W).

Autograd computes all three gradients in one call, so without the cut every convolution's weight gradient would be
computed in B. The two calls compute the same bits as the one. If nothing is split (BW) they are merged again: one call
shares the reordering of the output gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import is_getitem

aten = torch.ops.aten
_MASK = 10  # position of output_mask: (gradient of input, of weight, of bias)


def cut_convolutions(graph: Graph) -> int:
    """Cut every backward of a convolution that makes the input's gradient and another one; returns how many."""
    found = [n for n in graph.nodes if _is_convolution_backward(n) and n.args[_MASK][0] and any(n.args[_MASK][1:])]
    for node in found:
        _, weight, bias = node.args[_MASK]
        with graph.inserting_after(node):
            later = graph.call_function(node.target, _masked(node, [False, weight, bias]))
        later.meta = _meta(node, (False, weight, bias))
        for user in [u for u in node.users if is_getitem(u) and u.args[1] != 0]:
            user.args = (later, user.args[1])
        node.args = _masked(node, [True, False, False])
        node.meta = _meta(node, (True, False, False))
    return len(found)


def merge_convolutions(graph: Graph) -> None:
    """Undo `cut_convolutions`: merge calls that differ only in their masks."""
    first: dict[tuple[Any, ...], Node] = {}
    for node in [n for n in graph.nodes if _is_convolution_backward(n)]:
        arguments = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[:_MASK])
        keeper = first.setdefault(arguments, node)
        if keeper is not node and not any(a and b for a, b in _masks(keeper, node)):
            _merge(graph, keeper, node)


def _merge(graph: Graph, keeper: Node, node: Node) -> None:
    values = [a if a is not None else b for a, b in zip(keeper.meta["val"], node.meta["val"], strict=True)]
    mask = [a or b for a, b in _masks(keeper, node)]
    node.replace_all_uses_with(keeper)
    graph.erase_node(node)
    keeper.args = _masked(keeper, mask)
    keeper.meta = {key: value for key, value in keeper.meta.items() if key != "pass"} | {"val": tuple(values)}


def _is_convolution_backward(node: Node) -> bool:
    return node.target is aten.convolution_backward.default


def _masks(one: Node, other: Node) -> Iterator[tuple[Any, Any]]:
    return zip(one.args[_MASK], other.args[_MASK], strict=True)  # type: ignore[arg-type]


def _masked(node: Node, mask: list[Any]) -> tuple[Any, ...]:
    return (*node.args[:_MASK], mask)


def _meta(node: Node, mask: tuple[Any, ...]) -> dict[str, Any]:
    """The values that remain under `mask`."""
    values = tuple(value if wanted else None for value, wanted in zip(node.meta["val"], mask, strict=True))
    return {**node.meta, "val": values, "pass": "split"}
