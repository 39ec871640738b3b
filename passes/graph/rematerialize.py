"""Which operations may run a second time with the same bits, what the second run reads, and how they are copied."""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import is_getitem, is_random
from zbcompile.passes.torch_private import OpOverload, is_in_place

aten = torch.ops.aten
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


def can_remake(node: Node) -> bool:
    """Whether `node` can be recomputed from its inputs (`reads`) with the same bits.

    An operation cannot if it draws random numbers, writes in place or may differ from run to run, or if it belongs to
    another library, since nothing is known of it.
    """
    if is_getitem(node):
        return not is_random(node.args[0]) or _mask(node) is not None  # type: ignore[arg-type]
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    unsafe = is_in_place(target) or is_random(node) or torch.Tag.nondeterministic_bitwise in target.tags
    return not unsafe and target.overloadpacket.__name__ not in _UNINITIALISED


def reads(node: Node) -> list[Node]:
    """The nodes that recomputing `node` reads: for a dropout's result its input and mask, otherwise its inputs."""
    mask = _mask(node)
    return node.all_input_nodes if mask is None else [node.args[0].args[0], mask]  # type: ignore[union-attr, list-item]


def remake(graph: Graph, node: Node, value: Callable[[Node], Node]) -> Node:
    """Append a copy of `node` to `graph`; `value` maps what it reads."""
    mask = _mask(node)
    return graph.node_copy(node, value) if mask is None else _drop_again(graph, node, mask, value)


def _mask(node: Node) -> Node | None:
    """The node of the mask of a dropout's result; None for another node, or if the graph has no mask."""
    if not is_getitem(node) or node.args[1] != 0 or node.args[0].target is not aten.native_dropout.default:  # type: ignore
        return None
    return next((user for user in node.args[0].users if is_getitem(user) and user.args[1] == 1), None)  # type: ignore


def _drop_again(graph: Graph, node: Node, mask: Node, value: Callable[[Node], Node]) -> Node:
    """(input * mask) * 1/(1 - p): what torch's kernel computes, in its order (aten/native/Dropout.cpp, 2.11-2.13)."""
    dropped, probability = node.args[0].args[:2]  # type: ignore[union-attr]
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)  # type: ignore[operator]
    masked = graph.call_function(aten.mul.Tensor, (value(dropped), value(mask)))  # type: ignore[arg-type]
    scaled = graph.call_function(aten.mul.Tensor, (masked, scale))
    masked.meta, scaled.meta = dict(node.meta), dict(node.meta)
    return scaled
