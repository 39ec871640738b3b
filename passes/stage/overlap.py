"""Overlap: two passes of a rank as one graph, a forward and a backward (DualPipe's pairs,
DeepSeek-V3, arXiv 2412.19437, section 3.2), or one of these and a W of another microbatch or stage;
and products for weights within BW.

The order of each half stays, so its bits do; the halves are interleaved so that data of one
is exchanged while the other computes. Collectives are those of
`torch.distributed._functional_collectives`: an operation that issues, and `wait_tensor`. The first
half's results are sent as soon as they exist, and the second half's inputs are received when it
begins. The values are those of the halves run one after the other.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.cost.node_cost import node_bytes
from zbcompile.passes.graph.fx import copy_graph, reached, with_graph
from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.roles import GRADIENT
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import LazyGraphModule, OpOverload


@dataclass(frozen=True)
class MergedPieces:
    """Two passes as one graph.

    Its inputs are those of `first`, a function that takes the results of `first`, and a function
    that returns the inputs of `second`. It returns the results of `second`.
    """

    module: GraphModule
    first: PassGraph
    second: PassGraph


def take_input(values: list[Any], index: int) -> Any:
    """Graph op: returns one input of the second half, freed after its last user."""
    value, values[index] = values[index], None
    return value


def merge(first: PassGraph, second: PassGraph) -> MergedPieces:
    """Merges F or B of one stage with B, BW or W of one (the same or another) into one graph."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    first_nodes = _copy(first, graph, copies, "first_")
    inputs = [copies[node] for node in first.placeholders]
    take, give = graph.placeholder("take"), graph.placeholder("give")
    results = [copies[node] for node in first.results]
    first_nodes.append(graph.call_function(operator.call, (take, results)))
    received = graph.call_function(operator.call, (give,))  # may block on the receive
    second_nodes = [received]
    for index, node in enumerate(second.placeholders):
        copies[node] = graph.call_function(take_input, (received, index))
        copies[node].meta = dict(node.meta)
        second_nodes.append(copies[node])
    second_nodes += _copy(second, graph, copies, "second_")
    fill = {copies[node]: None for node in weight_only_nodes(second)}
    order = interleave(first_nodes, [n for n in second_nodes if n not in fill], list(fill))
    end = graph.output([copies[node] for node in second.results])
    for node in (*inputs, take, give, *order):
        end.prepend(node)
    attributes = {
        prefix + str(node.target): getattr(half.module, str(node.target))
        for prefix, half in (("first_", first), ("second_", second))
        for node in half.module.graph.find_nodes(op="get_attr")
    }
    module = LazyGraphModule(attributes, graph, class_name=first.title + second.title)
    return MergedPieces(module, first, second)


def _copy(piece: PassGraph, graph: Graph, copies: dict[Node, Node], prefix: str) -> list[Node]:
    copied = []
    for node in piece.module.graph.nodes:
        if node.op == "output" or node in copies:
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            copies[node].target = prefix + node.target
        if node.op != "placeholder":
            copied.append(copies[node])
    return copied


def weight_only_nodes(graph: PassGraph) -> list[Node]:
    """Returns the nodes of a BW that no input gradient and no collective needs; none if it does not
    wait for a collective."""
    calls = graph.calls
    if graph.kind != "BW" or not any(map(is_wait, calls)):
        return []
    gradients = [node for slot, node in graph.returns if slot.role == GRADIENT]
    exchanges = [node for node in calls if is_collective(node) or is_wait(node)]
    urgent = reached([*gradients, *exchanges], lambda node: node.all_input_nodes)
    return [node for node in calls if node not in urgent]


def _is_ready(node: Node, done: set[Node]) -> bool:
    return all(source in done or source.op != "call_function" for source in node.all_input_nodes)


LITTLE = 200  # of this many parts of both halves' work one is too little to switch before it


def interleave(
    first: Sequence[Node], second: Sequence[Node], fill: Sequence[Node] = ()
) -> list[Node]:
    """Returns both halves in one order that keeps the order of each, except that waits stand right
    before their first user. Collectives of both begin in an order that depends on nothing but their
    numbers: the ranks of a group may have shards, and so costs, of unequal size.

    The half with less to do before its first collective begins. It runs up to a wait, or to a
    collective whose turn it is not; then the other half runs, for its share of its remaining work
    (which has to cover all the waits to come) or up to its own next wait; then the first half
    continues. A wait that has been covered already does not switch. If both halves stand at waits,
    nodes of `fill` that are ready run, and then the wait for the collective that began earlier.
    Costs are the bytes that a node moves.
    """
    halves, pending = [late_waits(first), late_waits(second)], list(fill)
    waits = [sum(map(is_wait, half)) for half in halves]
    turns = _turns([sum(map(is_collective, half)) for half in halves])
    little = sum(map(_work, (*first, *second))) / LITTLE
    order: list[Node] = []
    # Of collectives: the work done before, and how much covers one.
    begun: dict[Node, tuple[float, float]] = {}
    placed, excused = set[Node](), set[Node]()
    done = 0.0
    current, budget = int(_before_a_wait(halves[1]) < _before_a_wait(halves[0])), float("inf")

    def place(node: Node) -> None:
        nonlocal done
        order.append(node)
        placed.add(node)
        done += _work(node)

    def is_held(index: int) -> bool:
        """True if the other half's next collective has to begin first."""
        return bool(halves[index]) and is_collective(halves[index][0]) and turns[0] != index

    def began(index: int) -> float:
        """When the collective that a half waits for began; infinite if the half cannot go on."""
        if not halves[index] or is_held(index):
            return float("inf")
        return begun.get(halves[index][0].all_input_nodes[0], (0.0, 0.0))[0]

    def stops(index: int) -> bool:
        half = halves[index]
        if not half or not is_wait(half[0]) or half[0] in excused:
            return is_held(index)
        before, share = begun.get(half[0].all_input_nodes[0], (done, 1))
        return done - before < share

    while any(halves):
        half, partner = halves[current], halves[1 - current]
        waiting = stops(current)
        if waiting and (not partner or stops(1 - current)):
            if pending and _is_ready(pending[0], placed):
                place(pending.pop(0))
                continue
            if began(1 - current) <= began(current):
                current = 1 - current
            excused.add(halves[current][0])
            continue
        if partner and (not half or waiting or (budget <= 0 and _work(half[0]) > little)):
            share = max(sum(map(_work, partner)) / max(waits[current], 1), 1)
            budget = share if waiting else float("inf")
            current = 1 - current
            continue
        node = half.pop(0)
        if is_collective(node):
            turns.pop(0)
            begun[node] = done, sum(map(_work, (*partner, *pending))) / max(waits[current], 1)
        waits[current] -= is_wait(node)
        budget -= _work(node)
        place(node)
    return [*order, *pending]


def _turns(counts: Sequence[int]) -> list[int]:
    """Returns which half begins each collective: those of the half with fewer, evenly spread.

    >>> _turns([2, 4])
    [1, 0, 1, 1, 0, 1]
    """
    places = [((i + 0.5) / count, half) for half, count in enumerate(counts) for i in range(count)]
    return [half for _, half in sorted(places)]


def _work(node: Node) -> int:
    """Returns the bytes that a node moves; 0 for collectives, which run elsewhere, and waits."""
    is_exchange = is_collective(node) or is_wait(node)
    return node_bytes(node) if isinstance(node.target, OpOverload) and not is_exchange else 0


def _before_a_wait(half: Sequence[Node]) -> float:
    """The work of a half up to its first wait; infinite if there is no wait."""
    place = next((i for i, node in enumerate(half) if is_wait(node)), None)
    return float("inf") if place is None else sum(map(_work, half[:place]))


def late_waits(nodes: Sequence[Node]) -> list[Node]:
    """Returns the nodes with each wait moved right before its first reader."""
    order: list[Node] = []
    pending: list[Node] = []
    for node in nodes:
        if is_wait(node) and not is_wait(node.all_input_nodes[0]):
            pending.append(node)
            continue
        for wait in [wait for wait in pending if wait in node.all_input_nodes]:
            order.append(wait)
            pending.remove(wait)
        order.append(node)
    return [*order, *pending]


def sink_waits(graph: PassGraph) -> PassGraph:
    """Returns the pass with each wait for a collective right before its first reader.

    In BW the nodes that only weight gradients need run before the waits.
    """
    if not any(map(is_wait, graph.calls)):
        return graph
    later = dict.fromkeys(weight_only_nodes(graph))
    urgent = [node for node in graph.calls if node not in later]
    order = interleave(urgent, [], list(later))
    copies: dict[Node, Node] = {}
    reordered = copy_graph(graph.module.graph, copies)
    for node in order:
        reordered.output_node().prepend(copies[node])
    return replace(graph, module=with_graph(graph.module, reordered))
