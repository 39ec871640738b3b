"""Save or recompute: which values the forward keeps for the backward, as a minimum cut.

Every value that the backward reads is either kept, at the cost of its bytes, or recomputed from
values that are themselves kept or recomputed. For any weighting of bytes against cost the best
choice is a minimum cut (Chen et al. 2016 pose the problem, arXiv:1604.06174). A budget of bytes is
met by the best corner of the convex hull of these choices.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import networkx  # torch depends on it
from networkx.algorithms.flow import preflow_push

from zbcompile.passes.graph.fx import reached

SOURCE, SINK = "source", "sink"
_TIE = 10**9  # one part in a billion per value: equal layers are then recomputed one by one


@dataclass(frozen=True)
class Candidates:
    """The values of a forward and what they cost.

    Attributes:
        backward_inputs: Values that the backward reads.
        inputs: For each value, those that recomputing it reads, without those that are always
            available.
        bytes: The bytes of each value that can be kept.
        cost: The cost of each value that can be recomputed.
    """

    backward_inputs: frozenset[Any]
    inputs: Mapping[Any, tuple[Any, ...]]
    bytes: Mapping[Any, int]
    cost: Mapping[Any, int]


@dataclass(frozen=True)
class SavedValues:
    """A choice: the values that are kept and those that are recomputed, with their sums."""

    saved: frozenset[Any]
    recomputed: frozenset[Any]
    bytes: int
    cost: int


def fewest_bytes(candidates: Candidates) -> SavedValues:
    """Returns the choice with the fewest bytes, and among those the cheapest."""
    return minimize(candidates, 1 + sum(candidates.cost.values()), 1)


def lowest_cost(candidates: Candidates) -> SavedValues:
    """Returns the choice with the lowest cost, and among those the one with the fewest bytes."""
    return minimize(candidates, 1, 1 + sum(candidates.bytes.values()))


def least_cost_within(candidates: Candidates, budget: int) -> SavedValues | None:
    """Returns the cheapest corner of the hull that keeps at most `budget` bytes.

    Returns None if no choice fits. Within one value of the optimum, because neighboring corners
    differ in few values.
    """
    costs = {
        value: cost * _TIE + index for index, (value, cost) in enumerate(candidates.cost.items())
    }
    uneven = replace(candidates, cost=costs)
    above, below = lowest_cost(uneven), fewest_bytes(uneven)
    if below.bytes > budget:
        return None
    while above.bytes > budget:  # each round finds a corner between the two, or that there is none
        byte_weight, cost_weight = below.cost - above.cost, above.bytes - below.bytes
        between = minimize(uneven, byte_weight, cost_weight)
        weighted = byte_weight * between.bytes + cost_weight * between.cost
        if weighted >= byte_weight * below.bytes + cost_weight * below.cost:
            above = below
        elif between.bytes <= budget:
            below = between
        else:
            above = between
    return replace(above, cost=above.cost // _TIE)


def minimize(candidates: Candidates, byte_weight: int, cost_weight: int) -> SavedValues:
    """Returns the choice that minimizes the weighted sum of bytes and cost.

    Each value has two vertices: "computed" is on the sink's side if the value is recomputed,
    "needed" if the backward needs it at all. To keep the value cuts the edge between them.
    """
    total = byte_weight * sum(candidates.bytes.values()) + cost_weight * sum(
        candidates.cost.values()
    )
    network = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    for value, inputs in candidates.inputs.items():
        size, cost = candidates.bytes.get(value), candidates.cost.get(value)
        computed, needed = ("computed", value), ("needed", value)
        keeps = total + 1 if size is None else byte_weight * size
        recomputes = total + 1 if cost is None else cost_weight * cost
        network.add_edge(computed, needed, capacity=keeps)
        network.add_edge(SOURCE, computed, capacity=recomputes)
        for source in inputs:
            network.add_edge(("needed", source), computed, capacity=total + 1)
    for value in candidates.backward_inputs:
        network.add_edge(("needed", value), SINK, capacity=total + 1)
    side = _source_side(preflow_push(network, SOURCE, SINK))
    needed_values = [value for value in candidates.inputs if ("needed", value) not in side]
    recomputed = frozenset(value for value in needed_values if ("computed", value) not in side)
    saved = frozenset(needed_values) - recomputed
    return SavedValues(
        saved,
        recomputed,
        sum(candidates.bytes[value] for value in saved),
        sum(candidates.cost[value] for value in recomputed),
    )


def _source_side(residual: Any) -> Set[Any]:
    """Returns the vertices that the source reaches in a residual network: its side of the smallest
    minimum cut."""
    return reached(
        [SOURCE],
        lambda tail: [
            head for head, edge in residual[tail].items() if edge["flow"] < edge["capacity"]
        ],
    ).keys()
