"""Rewritten pass graphs: accumulation, waits behind other work, equal graphs of equal layers."""

import torch
import torch.distributed._functional_collectives
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.roles import WEIGHT_GRADIENT, Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.sink_waits import sink_waits

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def chain(works: list[int], kind: str = "F", weights: int = 0) -> PassGraph:
    """Chains of operations with a collective and its wait between two of them."""
    graph = Graph()
    value = first = graph.placeholder("input_0")
    for number, work in enumerate(works, 1):
        for _ in range(work):
            value = graph.call_function(aten.sin.default, (value,))
        if number < len(works):
            sent = graph.call_function(c10d.all_to_all_single.default, (value, [4], [4], "tp"))
            value = graph.call_function(c10d.wait_tensor.default, (sent,))
    extra = [graph.call_function(aten.cos.default, (first,)) for _ in range(weights)]
    graph.output((value, *extra))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    outputs = (Slot("gradient", "x"), *(Slot(WEIGHT_GRADIENT, str(i)) for i in range(weights)))
    return PassGraph(1, kind, GraphModule({}, graph), (Slot("activation", "x"),), outputs)


def exposed(order: list[Node]) -> int:
    """Returns how many collectives have nothing between their begin and their wait."""
    return sum(
        order.index(wait) - order.index(wait.all_input_nodes[0]) == 1
        for wait in filter(is_wait, order)
    )


def test_weight_gradients_fill_the_waits() -> None:
    graph = chain([2, 2], kind="BW", weights=3)
    assert exposed(graph.calls) == 1
    sunk = sink_waits(graph)
    assert exposed(sunk.calls) == 0
    assert len(sunk.calls) == len(graph.calls)
    assert sink_waits(chain([4])).calls
    assert sum(map(is_collective, sunk.calls)) == 1
