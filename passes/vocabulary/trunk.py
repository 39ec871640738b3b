"""The trunk: the model without its output layer and loss, and without a lookup that is sharded. Its last stage returns
what the vocabulary shards need, its first receives what they have looked up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.capture.canonical import Canonical, drop_dead_code, infer_values
from zbcompile.passes.graph.fx import copied, like, with_graph
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.torch_private import FakeTensorMode, make_fx, source_of
from zbcompile.passes.vocabulary.embedding import VocabularyLookup
from zbcompile.passes.vocabulary.output_layer import VocabularyHead


def cut_off(canonical: Canonical, head: VocabularyHead, lookup: VocabularyLookup | None) -> Canonical:
    """`canonical` ending, instead of at the loss, with one activation: the output layer's input [tokens, width].

    With `lookup` it begins with another one, of that node's name: the rows that are looked up.
    """
    copies: dict[Node, Node] = {}
    graph = copied(canonical.graph, copies)
    if lookup is not None:
        copies[lookup.node] = _receive(graph, lookup.node.name, copies[lookup.node])
    with graph.inserting_before(graph.output_node()):
        leaving = _inlined(graph, head.tokens, [copies[node] for node in head.reads])
    outputs = [(slot, copies[node] if isinstance(node, Node) else node) for slot, node in canonical.outputs]
    ends: list[tuple[Slot, Any]] = [(slot, node) for slot, node in outputs if slot.kind not in ("loss", "output")]
    ends.append((Slot("activation", leaving.name), leaving))
    graph.output_node().args = (tuple(node for _, node in ends),)
    drop_dead_code(graph)
    inputs = tuple(node.meta["slot"] for node in graph.find_nodes(op="placeholder"))
    captured = replace(canonical.captured, inputs=inputs, outputs=tuple(slot for slot, _ in ends))
    module, mode = with_graph(canonical.module, graph), FakeTensorMode(allow_non_fake_inputs=True)
    infer_values(module, captured, mode)
    return Canonical(captured, module, mode)


def _receive(graph: Graph, name: str, node: Node) -> Node:
    """Let `node` arrive instead of being computed; return its replacement: a copy, because a value that later stages
    need too must be made on the first stage."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        arriving = graph.placeholder(f"activation_{name}")
    arriving.meta = {"val": node.meta["val"], "slot": Slot("activation", name), "differentiable": True}
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (arriving,))
    copy.meta = {"val": node.meta["val"], **source_of(node)}
    node.replace_all_uses_with(copy)
    graph.erase_node(node)
    return copy


def _inlined(graph: Graph, function: Callable[..., torch.Tensor], arguments: Sequence[Node]) -> Node:
    """Append the operations of `function` of some tensors to `graph`."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        likes = [like(argument.meta["val"]) for argument in arguments]
        traced = make_fx(lambda *values: function(*values))(*likes)  # a bound method counts one argument too many
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta |= source_of(arguments[0])
    (end,) = traced.graph.output_node().args
    assert isinstance(end, Node)
    return copies[end]
