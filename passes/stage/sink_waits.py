"""Moves waits for collectives behind other work of a pass, and keeps the order of all else."""

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from zbcompile.passes.graph.process_groups import is_wait
from zbcompile.passes.stage.overlap import late_waits, weight_only_nodes
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import LazyGraphModule


def sink_waits(graph: PassGraph) -> PassGraph:
    """Returns the pass with each wait for a collective right before its first reader.

    In BW the nodes that only weight gradients need run before the waits.
    """
    if not any(map(is_wait, graph.calls)):
        return graph
    later = set(weight_only_nodes(graph))
    urgent = [node for node in graph.calls if node not in later]
    order = _fill_waits(urgent, [node for node in graph.calls if node in later])
    reordered, copies = Graph(), dict[Node, Node]()
    inputs = [node for node in graph.module.graph.nodes if node.op in ("placeholder", "get_attr")]
    for node in [*inputs, *order]:
        copies[node] = reordered.node_copy(node, copies.__getitem__)
    reordered.output(tuple(copies[node] for node in graph.results))
    reordered.lint()
    return replace(graph, module=LazyGraphModule(graph.module, reordered, class_name=graph.title))


def _fill_waits(urgent: Sequence[Node], fill: Sequence[Node]) -> list[Node]:
    """Returns all nodes: before each wait those of `fill` that are ready."""
    order: list[Node] = []
    pending, missing = list(fill), {*urgent, *fill}
    for node in late_waits(urgent):
        while is_wait(node) and pending and missing.isdisjoint(pending[0].all_input_nodes):
            missing.discard(pending[0])
            order.append(pending.pop(0))
        missing.discard(node)
        order.append(node)
    return [*order, *pending]
