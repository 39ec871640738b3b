"""Simplify a joint graph without changing a bit: pairs of transposes cancel, equal views are taken once, and masks are
booleans."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import copied, with_graph
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.masks import keep_masks_as_booleans

aten = torch.ops.aten


def simplify(joint: Joint) -> Joint:
    """A copy of `joint` with fewer views: the backward of a linear layer transposes its weight gradient twice, and
    layers that share an input (q, k and v) flatten it once each. Masks of dropouts are kept as booleans."""
    joint = copy_joint(joint)
    joint = replace_nodes(joint, keep_masks_as_booleans(joint))
    cancelled = cancel_transposes(joint.module.graph)
    joint = replace_nodes(joint, cancelled)
    return replace_nodes(joint, merge_equal_views(joint.module.graph))


def copy_joint(joint: Joint) -> Joint:
    """A copy of the joint graph that a pass may change."""
    copies: dict[Node, Node] = {}
    module = with_graph(joint.module, copied(joint.module.graph, copies))
    return replace_nodes(replace(joint, module=module), copies)


def replace_nodes(joint: Joint, replaced: Mapping[Node, Node]) -> Joint:
    """`joint` with the replaced nodes among its inputs and outputs exchanged for their replacements."""
    inputs = tuple((slot, replaced.get(node, node)) for slot, node in joint.inputs)
    outputs = tuple((slot, replaced.get(node, node)) for slot, node in joint.outputs)
    return replace(joint, inputs=inputs, outputs=outputs)


def cancel_transposes(graph: Graph) -> dict[Node, Node]:
    """Replace t(t(x)) by x; return the replacement of each node that is gone."""
    gone: dict[Node, Node] = {}
    for node in list(graph.nodes):
        inner = node.args[0] if node.target is aten.t.default else None
        if isinstance(inner, Node) and inner.target is aten.t.default:
            gone[node] = inner.args[0]  # type: ignore[assignment]
            node.replace_all_uses_with(inner.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            if not inner.users:
                graph.erase_node(inner)
    return gone


def merge_equal_views(graph: Graph) -> dict[Node, Node]:
    """Keep the first of equal views of a value; return the replacement of each node that is gone."""
    first: dict[Any, Node] = {}
    gone: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if not is_view(node):
            continue
        keeper = first.setdefault((node.target, _hashable(node.args), _hashable(sorted(node.kwargs.items()))), node)
        if keeper is not node:
            gone[node] = keeper
            node.replace_all_uses_with(keeper)
            graph.erase_node(node)
    return gone


def _hashable(arguments: Any) -> Any:
    """Arguments as a key: nodes and numbers by value and type (1 is not True), lists as tuples."""
    if isinstance(arguments, list | tuple):
        return tuple(map(_hashable, arguments))
    return arguments if isinstance(arguments, Node) else (type(arguments), repr(arguments))
