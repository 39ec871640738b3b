"""Merged graphs: values and order of both halves, collectives behind the other's computation."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed._functional_collectives
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.roles import GRADIENT, WEIGHT_GRADIENT, Slot
from zbcompile.passes.stage.overlap import interleave, merge, sink_waits
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import OpOverload

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def chain(name: str, *works: int, operation: OpOverload = aten.sin.default) -> PassGraph:
    """Chains of operations with a collective and its wait between two of them."""
    graph = Graph()
    value = graph.placeholder(name)
    value.meta["val"] = torch.empty(4, device="meta")
    for number, work in enumerate(works, 1):
        for _ in range(work):
            value = graph.call_function(operation, (value,))
        if number < len(works):
            sent = graph.call_function(c10d.all_to_all_single.default, (value, [1], [1], "group"))
            value = graph.call_function(c10d.wait_tensor.default, (sent,))
    graph.output([value])
    in_place = operation is aten.sin_.default
    for node in graph.nodes:
        inner = in_place and node.target is operation
        node.meta["val"] = node.args[0].meta["val"] if inner else torch.empty(4, device="meta")
    slots = (Slot("batch", name),), (Slot("output", name),)
    return PassGraph(0, name, GraphModule({}, graph), *slots)


def weight_product(gradient: Node) -> Node:
    """A product for a weight gradient, without readers: half as much work as an operation."""
    product = gradient.graph.call_function(aten.cos.default, (gradient,))
    product.meta["val"] = torch.empty(0, device="meta")
    return product


def operations(piece: PassGraph) -> list[Node]:
    return [node for node in piece.module.graph.nodes if node.op == "call_function"]


def between(order: list[Node], half: list[Node]) -> list[int]:
    """For every collective of a half how many operations of the other half run until its wait."""
    waits = [(order.index(w.all_input_nodes[0]), order.index(w)) for w in half if is_wait(w)]
    return [sum(node not in half for node in order[start:end]) for start, end in waits]


def test_every_collective_has_work_of_the_other_half_behind_it() -> None:
    first, second = operations(chain("F", 3, 3, 3)), operations(chain("BW", 5, 5, 5))
    order = interleave(first, second)
    assert [node for node in order if node in first] == first
    assert [node for node in order if node in second] == second
    assert min(between(order, first)) >= 3
    assert min(between(order, second)) >= 1


def test_collectives_begin_in_one_order_however_long_the_work_takes() -> None:
    """Ranks of one group may have shards of unequal size: in different orders they would exchange
    the data of one half for that of the other, or wait for each other forever."""
    draw, seen = random.Random(0), set()
    for _ in range(50):
        works = [[draw.randrange(20) for _ in range(count)] for count in (3, 5)]
        halves = [operations(chain(name, *work)) for name, work in zip("FB", works, strict=True)]
        seen.add(tuple(node in halves[0] for node in interleave(*halves) if is_collective(node)))
    assert seen == {(False, True, False, False, True, False)}


@pytest.mark.parametrize("operation", [aten.sin.default, aten.sin_.default])
def test_work_is_kept_for_the_waits_to_come(operation: OpOverload) -> None:
    """One half with three collectives, the other with computation alone: a third of it for each."""
    first, second = (
        operations(chain("F", 1, 1, 1, 1)),
        operations(chain("BW", 9, operation=operation)),
    )
    assert between(interleave(first, second), first) == [3, 3, 3]


def test_a_merged_graph_hands_over_in_its_middle() -> None:
    """The forward's results leave before the backward's inputs are received."""
    merged = merge(chain("F", 2), chain("BW", 3))
    x, y, seen = torch.rand(4), torch.rand(4), []

    def give() -> list[torch.Tensor]:
        assert seen, "asked before the forward was done"
        return [y]

    (result,) = merged.module(x, seen.extend, give)
    assert torch.equal(seen[0], x.sin().sin())
    assert torch.equal(result, y.sin().sin().sin())


def test_weight_gradients_fill_the_waits() -> None:
    piece = chain("BW", 2, 2)
    graph = piece.module.graph
    with graph.inserting_before(graph.output_node()):
        products = [weight_product(piece.placeholders[0]) for _ in range(3)]
    graph.output_node().args = ((*piece.results, *products),)
    slots = (Slot(GRADIENT, "x"), *(Slot(WEIGHT_GRADIENT, product.name) for product in products))
    order = sink_waits(replace(piece, outputs=slots)).calls
    sent, wait = next(filter(is_collective, order)), next(filter(is_wait, order))
    assert order.index(wait) - order.index(sent) > 1
    assert len(order) == len(piece.calls)
