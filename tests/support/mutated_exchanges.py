"""Collectives of correct models dropped, doubled and moved, one at a time: which changes of numbers a proof finds.

    python -m tests.support.mutated_exchanges [--mutations 200] [--kinds cp-ring columns ...]

The graphs of two ranks are run side by side in this process, so that a mutation's loss and gradients can be held
against those of the model as it was.
"""

import argparse
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tests.support import dtensor_models
from tests.support.faulty_models import FAULTS, case_of
from tests.support.proofs import RANKS, Captured, Case, alone, captured, prove
from zbcompile.passes.graph.fx import call_like, copied, with_graph
from zbcompile.passes.graph.process_groups import group_of, is_under_way, is_wait
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.verification.value_kinds import texts_of

aten = torch.ops.aten
FAR = 1e-5  # relative to the largest entry: what counts as another number
Numbers = list[dict[str, Tensor]]  # of each rank


@dataclass(frozen=True)
class Mutation:
    """`change(graph, node)` is done to the wait number `place` of a graph."""

    what: str
    place: int
    change: Callable[[Node], bool]


def exchanges(graph: Graph, dimension: str) -> list[Node]:
    """The waits of a graph's collectives along a dimension."""
    return [node for node in graph.nodes if is_wait(node) and group_of(node.args[0]) == dimension]


def drop(wait: Node) -> bool:
    """The rank's own value in the place of what was exchanged, as often or as much of it as there is room."""
    issue = wait.args[0]
    assert isinstance(issue, Node)
    operand = issue.args[0]
    have, want = operand.meta["val"].numel(), wait.meta["val"].numel()  # type: ignore[union-attr]
    issue.target, issue.args = aten.clone.default, (operand,)
    if want > have:
        issue.target, issue.args = aten.cat.default, ([operand] * (want // have),)
    elif want < have:
        issue.target, issue.args = aten.slice.Tensor, (operand, 0, 0, wait.meta["val"].shape[0])
    wait.target = aten.clone.default
    return True


def double(wait: Node) -> bool:
    """The exchange once more, of what it gave; a sum if its result has another size."""
    issue = wait.args[0]
    assert isinstance(issue, Node)
    value = wait.meta["val"]
    graph = wait.graph
    with graph.inserting_before(wait):
        first = call_like(graph, wait, wait.target, (issue,), value)
        same = issue.args[0].meta["val"].shape == value.shape  # type: ignore[union-attr]
        target = issue.target if same else torch.ops._c10d_functional.all_reduce.default
        args = (first, *issue.args[1:]) if same else (first, "sum", group_of(issue))
        again = call_like(graph, wait, target, args, value)
    wait.args = (again,)
    return True


def move(wait: Node) -> bool:
    """The sum is formed behind the next operation instead of before it."""
    issue = wait.args[0]
    assert isinstance(issue, Node)
    users = [user for user in wait.users if user.op == "call_function" and not group_of(user)]
    if "all_reduce" not in str(issue.target) or len(users) != 1:
        return False
    (user,) = users
    value = user.meta.get("val")
    if not isinstance(value, Tensor) or value.shape != wait.meta["val"].shape or user.target is aten.copy.default:
        return False
    graph, dimension = wait.graph, group_of(issue)
    with graph.inserting_before(user):
        part = call_like(graph, user, user.target, user.args, value, **user.kwargs)
        summed = call_like(graph, user, torch.ops._c10d_functional.all_reduce.default, (part, "sum", dimension), value)
    user.target, user.args, user.kwargs = torch.ops._c10d_functional.wait_tensor.default, (summed,), {}
    return drop(wait)


CHANGES: Mapping[str, Callable[[Node], bool]] = {"drop": drop, "double": double, "move": move}


def changed(flow: GradientFlow, mutation: Mutation, dimension: str) -> GradientFlow | None:
    """A copy of a flow with a mutation; None if there is nothing to mutate so."""
    copies: dict[Node, Node] = {}
    module = with_graph(flow.module, copied(flow.module.graph, copies))
    copy = flow.moved(module, copies, lambda slot: slot)
    return copy if mutation.change(exchanges(module.graph, dimension)[mutation.place]) else None


def run(ranks: list[Captured], values: list[dict[str, Tensor]], dimension: str, averaged: bool) -> Numbers:
    """The loss and the gradients of each rank, from the graphs of one stage."""
    flows = [rank.flows[0] for rank in ranks]
    held: list[dict[Node, Any]] = [{} for _ in flows]
    slots = [{node: slot for slot, node in flow.inputs} for flow in flows]
    for nodes in zip(*(flow.module.graph.nodes for flow in flows), strict=True):
        if nodes[0].op == "output":
            break
        if group_of(nodes[0]) == dimension and is_under_way(nodes[0]):
            results = _exchanged(nodes[0], [own[node.args[0]] for node, own in zip(nodes, held, strict=True)])
        else:
            results = [
                _computed(node, own, slots[i].get(node), values[i], ranks[i], averaged)
                for i, (node, own) in enumerate(zip(nodes, held, strict=True))
            ]
        for node, own, result in zip(nodes, held, results, strict=True):
            own[node] = result
    return [
        {str(slot): own[node] for slot, node in flow.outputs if slot.kind in ("loss", "gradient")}
        for flow, own in zip(flows, held, strict=True)
    ]


def _computed(
    node: Node, own: Mapping[Node, Any], slot: Any, values: Mapping[str, Tensor], rank: Captured, averaged: bool
) -> Any:
    if slot is not None and slot.kind == "tangent":
        return torch.ones(()) / (RANKS if averaged else 1)
    if slot is not None:
        return rank.constants[slot.name] if slot.kind == "constant" else values[slot.name]
    if node.op == "get_attr":
        return getattr(rank.flows[0].module, str(node.target))
    if is_wait(node):
        return own[node.args[0]]  # type: ignore[index]
    args, kwargs = map_arg((node.args, dict(node.kwargs)), own.__getitem__)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _exchanged(issue: Node, given: list[Tensor]) -> list[Tensor]:
    name = issue.target.overloadpacket.__name__  # type: ignore[union-attr]
    if name.startswith("all_reduce"):
        operation = str(issue.args[1])
        whole = torch.stack(given)
        found = whole.sum(0) if operation == "sum" else whole.amax(0) if operation == "max" else whole.mean(0)
        return [found.clone() for _ in given]
    if name.startswith("all_gather"):
        return [torch.cat(given) for _ in given]
    if name.startswith("reduce_scatter"):
        return list(torch.stack(given).sum(0).chunk(RANKS))
    inputs = issue.args[2]
    sent = [each.split(_sizes(inputs, rank, each)) for rank, each in enumerate(given)]
    return [torch.cat([parts[rank] for parts in sent]) for rank in range(RANKS)]


def _sizes(sizes: Any, rank: int, tensor: Tensor) -> list[int]:
    """What a rank sends to each; the ring's ranks send all to the next one."""
    if rank and len(set(sizes)) > 1:
        return list(reversed(sizes))
    return list(sizes) or [tensor.shape[0] // RANKS] * RANKS


def differ(one: Numbers, other: Numbers, summed: Callable[[str], bool]) -> bool:
    """Whether a step of the one trains otherwise than a step of the other."""
    for key in one[0]:
        a, b = ([rank[key] for rank in numbers] for numbers in (one, other))
        if summed(key):
            a, b = [sum(a)], [sum(b)]  # type: ignore[list-item]
        if not all(float((x - y).abs().max()) <= FAR * float(y.abs().max() + 1e-30) for x, y in zip(a, b, strict=True)):
            return True
    return False


def all_cases() -> dict[str, Case]:
    from tests.passes.verification.test_placement_proof import by_hand, distributed

    dtensor_models.VOCABULARY = 12  # equal parts: the graphs of both ranks have the same operations
    named = {kind.replace(" ", "-"): by_hand(kind) for kind in ("tp functions", "tp sequence", "cp gather")}
    named |= {f"cp-{form}": by_hand(f"cp {form}") for form in ("ulysses", "ring")}
    named |= {f"dtensor-{form}": distributed(form) for form in ("plain", "sequence")}
    named |= {f"dtensor-{form}-deep": distributed(form, layers=2) for form in ("plain", "sequence")}
    kinds = {kind.__name__.lower(): fault for fault, (kind, *_) in FAULTS.items()}
    named |= {name: case_of(fault, right=True) for name, fault in kinds.items()}
    return {name: Case(case.make, case.dimension, case.placements, stages=1) for name, case in named.items()}


def mutations_of(graph: Graph, dimension: str) -> Iterator[Mutation]:
    for place in range(len(exchanges(graph, dimension))):
        for what, change in CHANGES.items():
            yield Mutation(what, place, change)


@dataclass
class Tally:
    """What became of mutations: `missed` are those whose numbers change and that are not found."""

    tried: int = 0
    changed: int = 0
    found: int = 0
    refused_alike: int = 0
    missed: list[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.missed = self.missed or []


def inputs_of(case: Case, rank: int, sharded: Collection[str]) -> dict[str, Tensor]:
    """The values that a rank's graph reads, by name; to be called inside `alone(rank)`, where nobody sends the parts of
    DTensors, which are drawn."""
    from tests.support.meshes import mesh_of
    from zbcompile.model.distributed_tensors import Parts

    mesh = mesh_of(pp=1, **{case.dimension: RANKS})
    model, _, x, y = case.make(mesh)
    Parts(model, {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()})
    state = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    draw = torch.Generator().manual_seed(rank)
    parts = {name: torch.randn(state[name].shape, generator=draw) / 4 for name in state if name in sharded}
    return {**state, **parts, "args[0]": x, "target": y}


def examine(name: str, case: Case, limit: int, tally: Tally) -> None:
    """Try up to `limit` mutations of a model."""
    torch.manual_seed(5)
    with alone(1):
        other = captured(case)
        beside = inputs_of(case, 1, other.sharded)
    torch.manual_seed(5)
    with alone(0):
        own = captured(case)
        values = inputs_of(case, 0, own.sharded)
        values |= {key: beside[key] for key in ("args[0]", "target")}
        averaged = case.dimension in ("cp", "dp", "ep")
        placement = _placements(case, own)

        def summed(key: str) -> bool:
            return (key == "loss" and averaged) or placement(key.partition(" ")[2]) == "partial"

        torch.manual_seed(6)
        expected = run([own, other], [values, beside], case.dimension, averaged)
        assert all(bool(value.isfinite().all()) for rank in expected for value in rank.values()), name
        pending = list(mutations_of(own.flows[0].module.graph, case.dimension))
        random.Random(name).shuffle(pending)
        for mutation in pending[:limit]:
            both = [changed(rank.flows[0], mutation, case.dimension) for rank in (own, other)]
            if both[0] is None or both[1] is None:
                continue
            mutants = [
                Captured([flow], rank.constants, rank.groups, rank.sharded)
                for flow, rank in zip(both, (own, other), strict=True)
                if flow is not None
            ]
            _count(
                f"{name}: {mutation.what} {mutation.place}", case, mutants, tally, expected, (values, beside), summed
            )


def _placements(case: Case, rank: Captured) -> Callable[[str], str]:
    from tests.support.proofs import axis_of

    return axis_of(case, rank.sharded).placement


def _count(
    what: str, case: Case, mutants: list[Captured], tally: Tally, expected: Numbers, values: Any, summed: Any
) -> None:
    averaged = case.dimension in ("cp", "dp", "ep")
    torch.manual_seed(6)
    numbers = run(mutants, list(values), case.dimension, averaged)
    changes = differ(numbers, expected, summed)
    texts = [set(texts_of(flow, mutants[1].constants, case.dimension)) for flow in mutants[1].flows]
    refused = bool(prove(case, mutants[0], texts).wrong)
    tally.tried += 1
    tally.changed += changes
    tally.found += changes and refused
    tally.refused_alike += refused and not changes
    if changes and not refused:
        tally.missed.append(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--kinds", nargs="+")
    options = parser.parse_args()
    cases = all_cases()
    tally = Tally()
    chosen = options.kinds or list(cases)
    for i, name in enumerate(chosen):
        left = options.mutations - tally.tried
        examine(name, cases[name], -(-left // (len(chosen) - i)), tally)
        print(
            f"{name}: {tally.tried} tried, {tally.changed} change numbers, {tally.found} of these are refused",
            flush=True,
        )
    print(f"refused although no number changes: {tally.refused_alike}; missed: {tally.missed or 'none'}")
    return 1 if tally.missed else 0


if __name__ == "__main__":
    sys.exit(main())
