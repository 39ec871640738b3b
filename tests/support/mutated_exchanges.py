"""Collectives of correct models dropped, doubled and moved, one at a time: which changes of numbers a proof finds.

    python -m tests.support.mutated_exchanges [--mutations 200] [--kinds cp-ring columns ...]

The graphs of two ranks are run side by side in this process, so that a mutation's loss and gradients can be held
against those of the model as it was.
"""

import argparse
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tests.support import dtensor_models
from tests.support.meshes import mesh_of
from tests.support.proofs import RANKS, Captured, Case, alone, axis_of, captured, prove
from tests.support.proven_models import all_cases
from zbcompile.batches.batch import whole_batch
from zbcompile.distributed.mesh import BATCHES, PARTS
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.graph.fx import call_like, copied, with_graph
from zbcompile.passes.graph.process_groups import group_of, is_under_way, is_wait
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.verification.exchanges import Exchange, exchange_of
from zbcompile.passes.verification.value_kinds import forward_nodes
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram

aten = torch.ops.aten
FAR = 1e-5  # relative to the largest entry: what counts as another number
Numbers = list[dict[str, Tensor]]  # of each rank


@dataclass(frozen=True)
class Mutation:
    """`change` is done to the exchange number `place` of a stage's graph."""

    what: str
    stage: int
    place: int
    change: Callable[[Node], bool]


def exchanges(graph: Graph, dimension: str) -> list[Node]:
    """The results of a graph's collectives along a dimension: waits, and custom operators, which wait themselves."""
    return [n for n in graph.nodes if not is_under_way(n) and group_of(_issue(n)) == dimension]


def _issue(node: Node) -> Node:
    issue = node.args[0] if is_wait(node) else node
    assert isinstance(issue, Node)
    return issue


def drop(wait: Node) -> bool:
    """The rank's own value in the place of what was exchanged, as often or as much of it as there is room."""
    issue = _issue(wait)
    operand = issue.args[0]
    have, want = operand.meta["val"].numel(), wait.meta["val"].numel()  # type: ignore[union-attr]
    if is_wait(wait):
        wait.target = aten.clone.default
    issue.target, issue.args, issue.kwargs = aten.clone.default, (operand,), {}
    if want > have:
        issue.target, issue.args = aten.cat.default, ([operand] * (want // have),)
    elif want < have:
        issue.target, issue.args = aten.slice.Tensor, (operand, 0, 0, wait.meta["val"].shape[0])
    return True


def double(wait: Node) -> bool:
    """The exchange once more, of what it gave; a sum if its result has another size."""
    issue = _issue(wait)
    value = wait.meta["val"]
    graph = wait.graph
    with graph.inserting_before(wait):
        if issue is wait:
            first = call_like(graph, wait, wait.target, wait.args, value, **wait.kwargs)
            wait.args = (first, *wait.args[1:])
            return True
        first = call_like(graph, wait, wait.target, (issue,), value)
        same = issue.args[0].meta["val"].shape == value.shape  # type: ignore[union-attr]
        target = issue.target if same else torch.ops._c10d_functional.all_reduce.default
        args = (first, *issue.args[1:]) if same else (first, "sum", group_of(issue))
        again = call_like(graph, wait, target, args, value)
    wait.args = (again,)
    return True


def move(wait: Node) -> bool:
    """The sum is formed behind the next operation instead of before it."""
    issue = _issue(wait)
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


def changed(rank: Captured, mutation: Mutation, dimension: str) -> Captured | None:
    """A rank's graphs with a mutation; None if there is nothing to mutate so."""
    flows, copies = list(rank.flows), dict[Node, Node]()
    flow = flows[mutation.stage]
    module = with_graph(flow.module, copied(flow.module.graph, copies))
    flows[mutation.stage] = flow.moved(module, copies, lambda slot: slot)
    done = mutation.change(exchanges(module.graph, dimension)[mutation.place])
    return replace(rank, flows=flows) if done else None


@dataclass
class RankStep:
    """A rank's step: what it has `read` and computed by name, the gradients that its stages pass back, and what is
    compared."""

    graphs: Captured
    read: dict[str, Tensor]
    tangents: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held: list[dict[Node, Any]] = [{} for _ in self.graphs.flows]

    def compute(self, stage: int, node: Node, slot: Slot | None, factor: float) -> Any:
        """What one operation makes; `factor`: the gradient of the loss."""
        if slot is not None and slot.kind == "tangent":
            return self.tangents.get(slot.name, torch.full((), factor))
        if slot is not None:
            return (self.graphs.constants if slot.kind == "constant" else self.read)[slot.name]
        if node.op == "get_attr":
            return getattr(self.graphs.flows[stage].module, str(node.target))
        held = self.held[stage]
        if is_wait(node):
            return held[node.args[0]]  # type: ignore[index]
        args, kwargs = map_arg((node.args, dict(node.kwargs)), held.__getitem__)  # type: ignore[arg-type]
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def leave(self, stage: int, kinds: Collection[str]) -> None:
        """Keep the results of a stage that are of these kinds."""
        for slot, node in self.graphs.flows[stage].outputs:
            value = self.held[stage][node] if slot.kind in kinds else None
            if slot.kind == "activation" and value is not None:
                self.read[slot.name] = value
            elif value is not None:
                into = self.tangents if slot.kind == "input_gradient" else self.numbers
                key = slot.name if slot.kind == "input_gradient" else str(slot)
                into[key] = into[key] + value if key in into else value

    def end(self, vocabulary: VocabularyProgram, factor: float) -> None:
        """The loss by the output layer that is sharded, and its gradients."""
        hidden, weight = (self.read[name].detach() for name in (vocabulary.activation, vocabulary.weight))
        with torch.enable_grad():
            logits = F.linear(hidden.requires_grad_(), weight.requires_grad_())
            loss = F.cross_entropy(logits.flatten(0, -2), self.read["target"].flatten())
            of_hidden, of_weight = torch.autograd.grad(loss * factor, (hidden, weight))
        self.tangents[vocabulary.activation] = of_hidden
        self.numbers |= {"loss": loss.detach(), str(Slot("gradient", vocabulary.weight)): of_weight}


def run(ranks: list[Captured], values: list[dict[str, Tensor]], dimension: str, averaged: bool) -> Numbers:
    """The loss and the gradients of each rank, from the graphs of their stages."""
    steps = [RankStep(rank, dict(read)) for rank, read in zip(ranks, values, strict=True)]
    factor, count = 1 / (RANKS if averaged else 1), len(ranks[0].flows)
    before = [[set(forward_nodes(flow)) for flow in rank.flows] for rank in ranks]
    with torch.no_grad():
        for stage in range(count):
            _play(steps, stage, dimension, factor, lambda i, node: node in before[i][stage])  # noqa: B023
            for step in steps:
                step.leave(stage, ("activation", "loss"))
        for step in steps:
            if step.graphs.vocabulary is not None:
                step.end(step.graphs.vocabulary, factor)
        for stage in reversed(range(count)):
            _play(steps, stage, dimension, factor, lambda i, node: node not in before[i][stage])  # noqa: B023
            for step in steps:
                step.leave(stage, ("input_gradient", "gradient"))
    return [step.numbers for step in steps]


def _play(steps: list[RankStep], stage: int, dimension: str, factor: float, plays: Callable[[int, Node], bool]) -> None:
    """Run the operations of a stage on all ranks, one after the other."""
    flows = [step.graphs.flows[stage] for step in steps]
    slots = [{node: slot for slot, node in flow.inputs} for flow in flows]
    for nodes in zip(*(flow.module.graph.nodes for flow in flows), strict=True):
        if nodes[0].op == "output" or not plays(0, nodes[0]):
            continue
        if group_of(nodes[0]) == dimension and not is_wait(nodes[0]):
            given = [step.held[stage][node.args[0]] for step, node in zip(steps, nodes, strict=True)]
            results = _exchanged(nodes[0], given, steps[0].graphs.groups)
        else:
            results = [
                step.compute(stage, node, slots[i].get(node), factor)
                for i, (step, node) in enumerate(zip(steps, nodes, strict=True))
            ]
        for step, node, result in zip(steps, nodes, results, strict=True):
            step.held[stage][node] = result


def _exchanged(issue: Node, given: list[Tensor], groups: Mapping[str, str]) -> list[Tensor]:
    if not is_under_way(issue):  # a custom operator: it sums, or does nothing but take a group
        found = exchange_of(issue, groups)
        assert found in (Exchange("sum", summed=True), Exchange("none")), issue
        return [sum(given) if found.summed else each.clone() for each in given]  # type: ignore[misc]
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


def mutated_cases() -> dict[str, Case]:
    """The cases whose ranks have the same operations, and exchange as many rows whatever they compute, as one stage."""
    dtensor_models.VOCABULARY = 12  # equal parts
    named = {name: case for name, case in all_cases().items() if name not in ("dtensor-odd", "ep-counted")}
    return {name: case if case.vocab else replace(case, stages=1) for name, case in named.items()}


def mutations_of(flows: list[GradientFlow], dimension: str) -> Iterator[Mutation]:
    for stage, flow in enumerate(flows):
        for place in range(len(exchanges(flow.module.graph, dimension))):
            for what, change in CHANGES.items():
                yield Mutation(what, stage, place, change)


@dataclass
class Tally:
    """What became of mutations: `missed` are those whose numbers change and that are not found."""

    tried: int = 0
    changed: int = 0
    found: int = 0
    refused_alike: int = 0
    missed: list[str] = field(default_factory=list)

    def count(self, what: str, changes: bool, refused: bool) -> None:
        self.tried += 1
        self.changed += changes
        self.found += changes and refused
        self.refused_alike += refused and not changes
        if changes and not refused:
            self.missed.append(what)


def inputs_of(case: Case, rank: int, sharded: Collection[str]) -> dict[str, Tensor]:
    """The values that a rank's graph reads, by name; to be called inside `alone(rank)`, where nobody sends the parts of
    DTensors, which are drawn. Ranks that share a batch must call it with the same seed."""
    mesh = mesh_of(pp=1, **{case.dimension: RANKS})
    model, _, batch = case.make(mesh)
    Parts(model, {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()})
    state = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    draw = torch.Generator().manual_seed(rank)
    parts = {name: torch.randn(state[name].shape, generator=draw) / 4 for name in state if name in sharded}
    return {**state, **parts, **whole_batch(batch.args, dict(batch.kwargs), batch.target).whole.tensors}


def examine(name: str, case: Case, limit: int, tally: Tally) -> None:
    """Try up to `limit` mutations of a model."""
    ranks, values = [], []
    for rank in reversed(range(RANKS)):
        torch.manual_seed(5 + rank * (case.dimension in BATCHES))
        with alone(rank):
            ranks.insert(0, captured(case))
            values.insert(0, inputs_of(case, rank, ranks[0].sharded))
    averaged, placement = case.dimension in PARTS, axis_of(case, ranks[0].sharded).placement

    def summed(key: str) -> bool:
        return (key == "loss" and averaged) or placement(key.partition(" ")[2]) == "partial"

    def numbers_of(given: list[Captured]) -> Numbers:
        torch.manual_seed(6)
        return run(given, values, case.dimension, averaged)

    with alone(0):
        expected = numbers_of(ranks)
        assert all(bool(value.isfinite().all()) for rank in expected for value in rank.values()), name
        pending = list(mutations_of(ranks[0].flows, case.dimension))
        random.Random(name).shuffle(pending)
        for mutation in pending[:limit]:
            mutants = [each for rank in ranks if (each := changed(rank, mutation, case.dimension)) is not None]
            if len(mutants) == len(ranks):
                changes = differ(numbers_of(mutants), expected, summed)
                what = f"{name}: {mutation.what} {mutation.stage} {mutation.place}"
                tally.count(what, changes, bool(prove(case, *mutants).wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--kinds", nargs="+")
    options = parser.parse_args()
    cases = mutated_cases()
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
