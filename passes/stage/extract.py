"""Extraction: one graph per label, whose inputs and outputs follow from liveness.

A value travels along the pipeline from the pass that computes it to the one that reads it: from F
to F of the next stage, from B to B of the stage before, and on one stage from F to B and W and from
B to W. Stages between pass it through.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import reached
from zbcompile.passes.graph.roles import ACTIVATION, GRADIENT, PART, SAVED, Role, Slot
from zbcompile.passes.split.split_backward import merge_convolutions
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import BACKWARD, END, FORWARD, WEIGHT, Label, Labels, StepGraph
from zbcompile.passes.torch_private import LazyGraphModule

Edges = dict[tuple[Label, Label], dict[Node, None]]  # (from, to) -> values


def extract(step: StepGraph, labels: Labels) -> tuple[dict[Label, PassGraph], dict[int, PassGraph]]:
    """Returns the pass graphs of all labels, and the fused backward BW of every stage.

    The passes are in the order in which one microbatch runs them.
    """
    extraction = Extraction(step, labels)
    passes = {label: extraction.pass_graph((label,)) for label in extraction.order}
    fused = {}
    for label in extraction.order:
        if label.kind == BACKWARD:
            fused[label.stage] = extraction.pass_graph((label, Label(label.stage, WEIGHT)))
            merge_convolutions(fused[label.stage].module)
    return passes, fused


class Extraction:
    """The routes of all values between the passes of a step."""

    def __init__(self, step: StepGraph, labels: Labels) -> None:
        self.step = step
        self.labels = labels
        self.nodes = list(step.graph.nodes)
        self.members: dict[Label, list[Node]] = defaultdict(list)
        self.edges: Edges = defaultdict(dict)
        for node in self.nodes:
            if node in labels:
                self.members[labels[node]].append(node)
                for label in dict.fromkeys(labels[user] for user in node.users if user in labels):
                    for edge in pairwise(_route(labels[node], label)):
                        self.edges[edge][node] = None
        self.order = self._order()
        self.inputs, self.results = step.inputs(), step.results()

    def pass_graph(self, group: Sequence[Label]) -> PassGraph:
        """Returns the graph of one label, or of B and W of one stage together."""
        members = [node for label in group for node in self.members.get(label, ())]
        nodes = set(members)
        arrivals, departures = self._arrivals(group), self._departures(group)
        relayed = [node for _, node in departures if node not in nodes]
        needed = self._free_inputs(members)
        graph, copies = Graph(), dict[Node, Node]()
        inputs: list[Slot] = []
        body = [node for node in self.nodes if node in nodes or node in needed]
        sources = [source for node in body for source in node.all_input_nodes]
        for source in dict.fromkeys((*sources, *relayed)):
            if source in nodes or source in needed or source.op == "get_attr":
                continue
            slot = arrivals.get(source) or self.inputs.get(source)
            assert slot is not None, f"{source.name} is computed by no stage"
            inputs.append(slot)
            copies[source] = graph.placeholder(f"input_{len(copies)}")
            copies[source].meta = {"val": source.meta.get("val")}
        for node in body:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in copies:
                    copies[source] = graph.node_copy(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = [*departures]
        outputs += [(slot, node) for slot, node in self.results if node in nodes]
        graph.output(tuple(copies[node] for _, node in outputs))
        graph.lint()
        stage, kind = group[0].stage, "".join(label.kind for label in group)
        return PassGraph(
            stage=stage,
            kind=kind,
            module=LazyGraphModule(self.step.module, graph, class_name=f"{kind}{stage}"),
            inputs=tuple(inputs),
            outputs=tuple(slot for slot, _ in outputs),
        )

    def _order(self) -> list[Label]:
        """Returns the labels in the order in which a microbatch runs them."""
        stages = range(1 + max((label.stage for label in self.labels.values()), default=0))
        order = [Label(stage, FORWARD) for stage in stages]
        if self.step.tangent is not None:
            order += [Label(n, kind) for n in reversed(stages) for kind in (BACKWARD, WEIGHT)]
        ends = (Label(stage, END) for stage in stages)
        return order + [label for label in ends if label in self.members]

    def _arrivals(self, group: Sequence[Label]) -> dict[Node, Slot]:
        return {
            node: Slot(_role(start, end), node.name)
            for (start, end), values in self.edges.items()
            if end in group and start not in group
            for node in values
        }

    def _departures(self, group: Sequence[Label]) -> list[tuple[Slot, Node]]:
        slots = {
            Slot(_role(start, end), node.name): node
            for (start, end), values in self.edges.items()
            if start in group and end not in group
            for node in values
        }
        rank = {node: index for index, node in enumerate(self.nodes)}
        return sorted(slots.items(), key=lambda item: (item[0].role, rank[item[1]]))

    def _free_inputs(self, members: Iterable[Node]) -> set[Node]:
        """Returns the free nodes that the members read, directly or through free nodes."""

        def is_free(node: Node) -> bool:
            return node.op == "call_function" and node not in self.labels

        sources = reached(
            (source for node in members for source in node.all_input_nodes),
            lambda node: node.all_input_nodes if is_free(node) else (),
        )
        return set(filter(is_free, sources))


def _route(start: Label, end: Label) -> Iterable[Label]:
    """Returns the passes on the way of a value: up the stages in F, and down them in B."""
    if start == end or end.kind == END:
        return start, end
    way = [Label(stage, FORWARD) for stage in range(start.stage, end.stage + 1)]
    if start.kind == BACKWARD or not way:
        way = [Label(stage, BACKWARD) for stage in range(start.stage, end.stage - 1, -1)]
    assert way, f"no way from {start} to {end}"
    assert start.kind != WEIGHT, f"no way from {start} to {end}"
    return dict.fromkeys([start, *way, end])


def _role(start: Label, end: Label) -> Role:
    if end.kind == END:
        return PART
    if start.stage == end.stage:
        return SAVED
    return ACTIVATION if start.kind == FORWARD else GRADIENT
