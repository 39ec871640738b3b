"""Loads that are equal on all ranks."""

from typing import Any

import pytest
from torch.fx import Graph

from zbcompile.passes.machine.hardware import hardware_for
from zbcompile.passes.partition import node_costs
from zbcompile.passes.partition.inside_calls import CallPasses


def test_seconds_of_a_call_do_not_depend_on_the_order_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process iterates over a set of nodes in an order of its own; ranks that disagree in a bit cut apart."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    seconds = dict(zip(nodes, (0.1, 0.2, 0.3), strict=True))
    monkeypatch.setattr(node_costs, "node_seconds", lambda node, *rest: seconds[node])

    def priced(order: Any) -> float:
        passes: Any = (order, (), ())
        return node_costs._call_seconds(CallPasses(passes, dict.fromkeys(nodes, 0)), hardware_for("cpu"))

    assert sum(seconds.values()) != sum(reversed(seconds.values()))
    assert priced(nodes) == priced(nodes[::-1])
