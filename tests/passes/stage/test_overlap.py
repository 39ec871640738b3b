"""Merged graphs: both halves' values, each half in its own order, collectives of one behind the
other's computation."""

from dataclasses import replace

import pytest
import torch
import torch.distributed._functional_collectives
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.roles import GRADIENT, WEIGHT_GRADIENT, Slot
from zbcompile.passes.stage.overlap import interleave, merge, sink_waits
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import OpOverload, is_in_place

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def chain(
    name: str, exchanges: int, work: int, operation: OpOverload = aten.sin.default
) -> PassGraph:
    """`work` operations, then a collective and its wait, again and again; as many operations at the
    end."""
    return chain_of(name, [work] * (exchanges + 1), operation)


def chain_of(name: str, works: list[int], operation: OpOverload = aten.sin.default) -> PassGraph:
    """Chains of operations with a collective and its wait between two of them."""
    graph = Graph()
    value = graph.placeholder(name)
    for number, work in enumerate(works, 1):
        for _ in range(work):
            value = graph.call_function(operation, (value,))
        if number < len(works):
            sent = graph.call_function(c10d.all_to_all_single.default, (value, [1], [1], "group"))
            value = graph.call_function(c10d.wait_tensor.default, (sent,))
    graph.output([value])
    for node in graph.nodes:
        node.meta["val"] = (
            node.args[0].meta["val"] if is_in_place(node.target) else torch.empty(4, device="meta")
        )
    return PassGraph(
        0, name, GraphModule({}, graph), (Slot("batch", name),), (Slot("output", name),)
    )


def weight_product(gradient: Node) -> Node:
    """Returns a product for a weight gradient, without readers: half as much work as the operations of a chain."""
    product = gradient.graph.call_function(aten.cos.default, (gradient,))
    product.meta["val"] = torch.empty(0, device="meta")
    return product


def operations(piece: PassGraph) -> list[Node]:
    return [node for node in piece.module.graph.nodes if node.op == "call_function"]


def between(order: list[Node], half: list[Node]) -> list[int]:
    """Returns for every collective of a half how many operations of the other half run until its wait."""
    own, counts = set(half), []
    for wait in filter(is_wait, half):
        start = wait.all_input_nodes[0]
        inside = order[order.index(start) : order.index(wait)]
        counts.append(sum(node not in own for node in inside))
    return counts


def test_every_collective_has_work_of_the_other_half_behind_it() -> None:
    first, second = operations(chain("F", 2, 3)), operations(chain("BW", 2, 5))
    order = interleave(first, second)
    assert [node for node in order if node in first] == first
    assert [node for node in order if node in second] == second
    assert min(between(order, first)) >= 3
    assert min(between(order, second)) >= 1


@pytest.mark.parametrize("operation", [aten.sin.default, aten.sin_.default])
def test_work_is_kept_for_the_waits_to_come(operation: OpOverload) -> None:
    """One half with three collectives, the other with computation alone: a third of it for each."""
    first, second = operations(chain("F", 3, 1)), operations(chain("BW", 0, 9, operation))
    assert between(interleave(first, second), first) == [3, 3, 3]


def test_the_half_that_can_start_a_collective_sooner_begins() -> None:
    """Its exchange is then under way while the other half computes; otherwise both would wait at
    once."""
    first, second = operations(chain("F", 1, 9)), operations(chain("BW", 1, 1))
    order = interleave(first, second)
    assert order[0] is second[0]
    assert between(order, second) == [10]  # what F does before its own exchange, and that
    assert min(between(order, first)) >= 1


def test_exchanges_on_both_sides_of_the_experts_hide_behind_the_other_half() -> None:
    """Tokens go to the experts of a layer at its begin and come back at its end, and so do
    gradients. If both halves begin with an exchange, one of these two has nothing to hide behind,
    and no other one."""
    layers = [0, 1, 0, 1, 0]
    forward, backward = operations(chain_of("F", layers)), operations(chain_of("BW", layers))
    products = [weight_product(node) for node in backward if node.target is aten.sin.default]
    order = interleave(forward, backward, products)
    begun = {wait: order.index(wait.all_input_nodes[0]) for wait in order if is_wait(wait)}
    behind = [
        sum(not (is_collective(node) or is_wait(node)) for node in order[at : order.index(w)])
        for w, at in begun.items()
    ]
    assert behind[0] == 0
    assert min(behind[1:]) == 1


def test_the_half_with_collectives_begins() -> None:
    first, second = operations(chain("F", 0, 9)), operations(chain("BW", 1, 3))
    assert between(interleave(first, second), second) == [9]


def test_without_collectives_the_forward_comes_first() -> None:
    first, second = operations(chain("F", 0, 3)), operations(chain("BW", 0, 3))
    assert interleave(first, second) == [*first, *second]


def test_waits_move_behind_what_does_not_need_them() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(c10d.all_to_all_single.default, (x, [1], [1], "group"))
    wait = graph.call_function(c10d.wait_tensor.default, (sent,))
    other = graph.call_function(aten.sin.default, (x,))
    used = graph.call_function(aten.add.Tensor, (wait, other))
    assert interleave([sent, wait, other, used], []) == [sent, other, wait, used]


def test_a_merged_graph_hands_over_in_its_middle() -> None:
    """The forward's results leave before the backward's inputs are asked for, and both are what
    they are alone."""
    forward, backward = chain("F", 0, 2), chain("BW", 0, 3)
    merged = merge(forward, backward)
    x, y, seen = torch.rand(4), torch.rand(4), []

    def take(results: list[torch.Tensor]) -> None:
        seen.extend(results)

    def give() -> list[torch.Tensor]:
        assert seen, "asked before the forward was done"
        return [y]

    (result,) = merged.module(x, take, give)
    (handed,), (expected,) = forward.module(x), backward.module(y)
    assert torch.equal(handed, x.sin().sin())
    assert torch.equal(seen[0], handed)
    assert torch.equal(result, expected)


def test_weight_gradients_fill_the_waits() -> None:
    piece = chain_of("BW", [2, 2])
    graph = piece.module.graph
    with graph.inserting_before(graph.output_node()):
        products = [weight_product(piece.placeholders[0]) for _ in range(3)]
    graph.output_node().args = ((*piece.results, *products),)
    slots = (Slot(GRADIENT, "x"), *(Slot(WEIGHT_GRADIENT, product.name) for product in products))
    order = sink_waits(replace(piece, outputs=slots)).calls
    sent, wait = next(filter(is_collective, order)), next(filter(is_wait, order))
    assert order.index(wait) - order.index(sent) > 1
    assert len(order) == len(piece.calls)
