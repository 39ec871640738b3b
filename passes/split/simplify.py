"""Simplify a joint graph without changing a bit: pairs of transposes cancel, equal views are taken once, and what waits
of a dropout for the backward is one byte per element.

Eager keeps a dropout's mask divided by 1 - p, in the precision of the input. Here it is drawn as booleans, of which the
generator gives the same, and the backward casts and divides them again: the same operations, so the same bits.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import copied, with_graph
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.split.joint_graph import Joint, reached_by_gradients
from zbcompile.passes.split.weight_cut import is_cheap
from zbcompile.passes.torch_private import TO_COPY

aten = torch.ops.aten
_UNINITIALISED = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


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


def keep_masks_as_booleans(joint: Joint) -> dict[Node, Node]:
    """Rewrite the graph of `joint`; return the replacement of each mask."""
    graph = joint.module.graph
    backward = reached_by_gradients(joint)
    cast: dict[Node, Node] = {}
    for mask in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        memory = _memory(mask)
        made = _made_of(mask, graph)
        readers = [node for node in graph.nodes if node in backward and not made.isdisjoint(node.all_input_nodes)]
        if readers and memory[-1].target in _UNINITIALISED and mask.meta["val"].dtype != torch.bool:
            cast[mask] = _draw_as_booleans(graph, mask, memory)
            _remake(graph, mask, made - {mask} | {cast[mask]}, readers)
    return cast


def _memory(mask: Node) -> list[Node]:
    """The memory that a mask is drawn into - views and their base - if nothing else reads it."""
    chain = [mask]
    while isinstance(source := chain[-1].args[0], Node) and len(source.users) == 1:
        chain.append(source)
        if not is_view(source):
            break
    return chain


def _made_of(mask: Node, graph: Graph) -> set[Node]:
    """`mask`, and the results of cheap operations that read only it and numbers."""
    made = {mask}
    for node in graph.nodes:
        if (is_cheap(node) or is_view(node)) and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def _draw_as_booleans(graph: Graph, mask: Node, memory: list[Node]) -> Node:
    """Turn `mask` and its memory into booleans; returns the cast that stands for it."""
    value = mask.meta["val"]
    with graph.inserting_after(mask):
        cast = graph.call_function(TO_COPY, (mask,), {"dtype": value.dtype})
    cast.meta = {**mask.meta, "pass": "simplify"}
    mask.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    for node in memory:
        node.meta["val"] = node.meta["val"].to(torch.bool)
    memory[-1].kwargs = {**memory[-1].kwargs, "dtype": torch.bool}
    return cast


def _copy(graph: Graph, node: Node, again: Mapping[Node, Node]) -> Node:
    """A copy of `node` whose value has memory of its own: both may be alive at once."""
    copy = graph.node_copy(node, again.__getitem__)
    args, kwargs = map_arg((copy.args, copy.kwargs), lambda read: read.meta["val"])
    with torch.no_grad():
        copy.meta["val"] = copy.target(*args, **kwargs)  # type: ignore[operator]
    return copy


def _remake(graph: Graph, mask: Node, made: Set[Node], readers: list[Node]) -> None:
    """Let `readers` read copies of `made`, computed just before the first of them."""
    again = {mask: mask}
    ordered = [node for node in graph.nodes if node in made]
    for node in ordered:
        with graph.inserting_before(readers[0]):
            again[node] = _copy(graph, node, again)
    for reader in readers:
        for node in ordered:
            reader.replace_input_with(node, again[node])
    for node in reversed(list(again.values())):
        if not node.users:
            graph.erase_node(node)
