"""A graph as a code generator sees it: without names, and with its tensors among its inputs.

Pieces of stages that differ only in names have equal texts, on every rank and in every run, so one
compilation serves them all.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

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
        inputs: Fake tensors of one mode. The last ones stand for `constants`.
        constants: The tensors that the graph refers to.
        text: Equal for graphs that do the same work.
    """

    title: str
    module: GraphModule
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    text: str


def bare(module: GraphModule) -> BareGraph:
    """Returns the graph of `module` without names."""
    attributes: dict[Node, Any] = {
        node: attrgetter(str(node.target))(module)
        for node in module.graph.find_nodes(op="get_attr")
    }
    constants = {n: value for n, value in attributes.items() if isinstance(value, Tensor)}
    branches = {str(n.target): value for n, value in attributes.items() if n not in constants}
    values = {node: node.meta["val"] for node in module.graph.find_nodes(op="placeholder")}
    graph, copies = Graph(), dict[Node, Node]()
    # A code generator refuses fake tensors of several modes.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode, torch.no_grad():
        for number, (node, value) in enumerate({**values, **constants}.items()):
            copies[node] = graph.placeholder(f"arg_{number}")
            copies[node].meta = {"val": like(value)}
        inputs = tuple(copy.meta["val"] for copy in copies.values())
        results = set(output_values(module.graph))
        for node in module.graph.nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {"val": like(node.meta["val"])} if node in results else {}
    copied = GraphModule(branches, graph, class_name="Bare")
    text = graph_text(copied)
    return BareGraph(type(module).__name__, copied, inputs, tuple(constants.values()), text)
