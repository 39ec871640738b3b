"""A graph as a code generator sees it: without names.

Pieces of stages that differ only in names have equal texts, on every rank and in every run, so one
compilation serves them all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.fx import graph_text, like, output_values
from zbcompile.passes.torch_private import FakeTensorMode, ShapeEnv


@dataclass(frozen=True)
class BareGraph:
    """A graph without names.

    Attributes:
        title: The pass and its stage, such as F2.
        module: Takes `inputs` and returns a list of tensors. The fake values of its output nodes
            have the strides that other passes expect.
        inputs: Fake tensors of one mode.
        text: Equal for graphs that do the same work.
    """

    title: str
    module: GraphModule
    inputs: tuple[Tensor, ...]
    text: str


def bare(module: GraphModule) -> BareGraph:
    """Returns the graph of `module` without names."""
    graph, copies = Graph(), dict[Node, Node]()
    # A code generator refuses fake tensors of several modes.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode, torch.no_grad():
        for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
            copies[node] = graph.placeholder(f"arg_{number}")
            copies[node].meta = {"val": like(node.meta["val"])}
        inputs = tuple(copy.meta["val"] for copy in copies.values())
        results = set(output_values(module.graph))
        for node in module.graph.nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {"val": like(node.meta["val"])} if node in results else {}
    copied = GraphModule(module, graph, class_name="Bare")
    return BareGraph(type(module).__name__, copied, inputs, graph_text(copied))
