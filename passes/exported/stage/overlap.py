"""Overlap: two passes of a rank as one graph, so that collectives of one run while the other
computes (DualPipe's pairs of F and B: DeepSeek-V3, arXiv 2412.19437, section 3.2).

The order of each half stays, and with it its bits. The halves alternate at waits for collectives.
The first half's results are sent as soon as they exist, and the second half's inputs are received
when it begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.exported.capture.process_groups import is_collective, is_wait
from zbcompile.passes.exported.stage.pass_graph import GRADIENT, PassGraph
from zbcompile.passes.exported.torch_private import LazyGraphModule


@dataclass(frozen=True)
class MergedPass:
    """Two passes as one graph.

    Its inputs are those of the first pass, then a function that takes the list of the first pass's
    results, then one that returns the list of the second pass's inputs. It returns the results of
    the second pass.
    """

    module: GraphModule
    first: PassGraph
    second: PassGraph


def emit_outputs(send: Callable[[list[Any]], None], values: Sequence[Any]) -> None:
    """Graph operation: passes on the results of the first half."""
    send(list(values))


def await_inputs(receive: Callable[[], list[Any]]) -> list[Any]:
    """Graph operation: returns the inputs of the second half; may block on a message."""
    return receive()


def take_input(values: list[Any], index: int) -> Any:
    """Graph operation: returns one input of the second half, which its last reader frees."""
    value, values[index] = values[index], None
    return value


def merge_passes(first: PassGraph, second: PassGraph) -> MergedPass:
    """Returns F or B of one stage and B, BW or W of the same or another stage as one graph.

    Weight gradients of a second BW run while both halves wait.
    """
    graph, copies = Graph(), dict[Node, Node]()
    attributes: dict[str, Any] = {}
    for node in first.placeholders:
        copies[node] = graph.placeholder(f"input_{len(copies)}")
        copies[node].meta = dict(node.meta)
    send, receive = graph.placeholder("send"), graph.placeholder("receive")
    one = _copy_calls(first, graph, copies, attributes, "first_")
    sent = graph.call_function(emit_outputs, (send, [copies[node] for node in first.results]))
    received = graph.call_function(await_inputs, (receive,))
    for index, node in enumerate(second.placeholders):
        copies[node] = graph.call_function(take_input, (received, index))
        copies[node].meta = dict(node.meta)
    taken = [copies[node] for node in second.placeholders]
    other = _copy_calls(second, graph, copies, attributes, "second_")
    later = {copies[node] for node in weight_only_nodes(second)}
    urgent = [received, *taken, *(node for node in other if node not in later)]
    output = graph.output([copies[node] for node in second.results])
    for node in interleave([*one, sent], urgent, [node for node in other if node in later]):
        output.prepend(node)
    graph.lint()
    module = LazyGraphModule(attributes, graph, class_name="Merged")
    return MergedPass(module, first, second)


def sink_waits(graph: PassGraph) -> PassGraph:
    """Returns the pass with each wait for a collective right before its first reader.

    In BW the nodes that only weight gradients need run before the waits.
    """
    if not any(map(is_wait, graph.calls)):
        return graph
    later = set(weight_only_nodes(graph))
    urgent = [node for node in graph.calls if node not in later]
    order = interleave(urgent, [], [node for node in graph.calls if node in later])
    reordered, copies = Graph(), dict[Node, Node]()
    others = [node for node in graph.module.graph.nodes if node.op in ("placeholder", "get_attr")]
    for node in [*others, *order]:
        copies[node] = reordered.node_copy(node, copies.__getitem__)
    reordered.output(tuple(copies[node] for node in graph.results))
    reordered.lint()
    return replace(graph, module=LazyGraphModule(graph.module, reordered, class_name="Pass"))


def weight_only_nodes(graph: PassGraph) -> list[Node]:
    """Returns the nodes of a BW that no input gradient and no collective needs.

    Empty for other passes, and for a pass without collectives.
    """
    if graph.kind != "BW" or not any(map(is_wait, graph.calls)):
        return []
    results = zip(graph.outputs, graph.results, strict=True)
    pending = [node for slot, node in results if slot.role == GRADIENT]
    pending += filter(is_collective, graph.calls)
    urgent: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in urgent:
            urgent.add(node)
            pending.extend(node.all_input_nodes)
    return [node for node in graph.calls if node not in urgent]


def interleave(
    first: Sequence[Node], second: Sequence[Node], fill: Sequence[Node] = ()
) -> list[Node]:
    """Returns both halves in one order that keeps the order of each.

    A half runs up to a wait, then the other half runs up to its own. Waits stand right before
    their first reader. If both halves stand at waits, the nodes of `fill` that are ready run
    first, and then the wait of the collective that began earlier.
    """
    halves = [_late_waits(first), _late_waits(second)]
    filling, order = list(fill), list[Node]()
    placed: dict[Node, int] = {}
    current = int(_nodes_before_wait(halves[1]) < _nodes_before_wait(halves[0]))

    def place(node: Node) -> None:
        placed[node] = len(order)
        order.append(node)

    inside = {*first, *second, *fill}
    while any(halves):
        half, other = halves[current], halves[1 - current]
        while half and not is_wait(half[0]):
            place(half.pop(0))
        if half and not (other and not is_wait(other[0])):  # the other half waits, or has ended
            while filling and _is_ready(filling[0], placed, inside):
                place(filling.pop(0))
            if other and _begin(placed, other[0]) < _begin(placed, half[0]):
                half, current = other, 1 - current
            place(half.pop(0))
        else:
            current = 1 - current
    return [*order, *filling]


def _is_ready(node: Node, placed: dict[Node, int], inside: set[Node]) -> bool:
    return all(source in placed or source not in inside for source in node.all_input_nodes)


def _begin(placed: dict[Node, int], wait: Node) -> int:
    return placed.get(wait.all_input_nodes[0], 0)


def _nodes_before_wait(half: Sequence[Node]) -> float:
    """Returns the number of nodes before the first wait; infinite if there is none."""
    return next((float(i) for i, node in enumerate(half) if is_wait(node)), float("inf"))


def _late_waits(nodes: Sequence[Node]) -> list[Node]:
    """Returns the nodes with each wait moved right before its first reader."""
    order: list[Node] = []
    pending: list[Node] = []
    for node in nodes:
        if is_wait(node) and not is_wait(node.all_input_nodes[0]):
            pending.append(node)
            continue
        ready = [wait for wait in pending if wait in node.all_input_nodes]
        pending = [wait for wait in pending if wait not in ready]
        order += [*ready, node]
    return [*order, *pending]


def _copy_calls(
    graph: PassGraph,
    merged: Graph,
    copies: dict[Node, Node],
    attributes: dict[str, Any],
    prefix: str,
) -> list[Node]:
    """Copies attributes and operations into the merged graph and returns the operations."""
    calls = []
    for node in graph.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copies[node] = merged.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            name = prefix + str(node.target).replace(".", "_")
            attributes[name] = attrgetter(str(node.target))(graph.module)
            copies[node].target = name
        else:
            calls.append(copies[node])
    return calls
