"""A graph as a code generator sees it: without names, with its tensors among its inputs, and with a
text that is equal for graphs that do the same work.

Pieces of stages that differ only in names have equal texts, on every rank and in every run, so one
compilation serves them all.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.fx import NodeNumber, call_text, like, node_numbers, output_values
from zbcompile.passes.graph.storage import content_of
from zbcompile.passes.torch_private import FakeTensorMode


@dataclass(frozen=True)
class BareGraph:
    """`module` takes `inputs` (fake tensors of one mode; for the last ones, the tensors
    `constants`) and returns a list of tensors. `text` is equal for graphs that do the same work;
    `title` is a pass and its stage, such as F2.
    """

    title: str
    module: GraphModule
    inputs: tuple[torch.Tensor, ...]
    constants: tuple[torch.Tensor, ...]
    text: str

    @property
    def results(self) -> int:
        """The number of values that it returns."""
        return len(output_values(self.module.graph))


def bare(module: GraphModule) -> BareGraph:
    """The bare form of a piece's graph."""
    graph, held = Graph(), _HeldAttributes(module)
    copies: dict[Node, Node] = {}
    for number, node in enumerate([*module.graph.find_nodes(op="placeholder"), *held.tensor_nodes]):
        copies[node] = graph.placeholder(f"arg_{number}")
    inputs = _fresh([held.value(node) for node in copies])
    for copy, value in zip(copies.values(), inputs, strict=True):
        copy.meta = {"val": value}
    for node in module.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    constants = tuple(held.value(node) for node in held.tensor_nodes)
    copied = GraphModule(held.branches, graph, class_name="Bare")
    return BareGraph(type(module).__name__, copied, inputs, constants, text_of(copied))


def text_of(module: GraphModule) -> str:
    """The inputs and every operation with its arguments, as text, with nodes numbered in order of
    appearance."""
    numbers = node_numbers(module.graph)
    return "\n".join(
        f"{number} {node.op} {_described(node, numbers, module)}"
        for node, number in numbers.items()
    )


class _HeldAttributes:
    """The attributes that a graph refers to by name: tensors, and the graphs of branches."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        nodes = module.graph.find_nodes(op="get_attr")
        self.tensor_nodes = [node for node in nodes if isinstance(self.value(node), torch.Tensor)]
        self.branches = {str(n.target): self.value(n) for n in nodes if n not in self.tensor_nodes}

    def value(self, node: Node) -> Any:
        return (
            attrgetter(str(node.target))(self.module) if node.op == "get_attr" else node.meta["val"]
        )


def _fresh(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Fake tensors with the same metadata, all of one mode: a code generator refuses a mixture."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return tuple(like(value) for value in values)


def _described(node: Node, numbers: Mapping[Node, NodeNumber], module: GraphModule) -> str:
    if node.op == "placeholder":
        value = node.meta.get(
            "val"
        )  # a branch's inputs have the form of the operands that it is called with
        if not isinstance(value, torch.Tensor):
            return "" if value is None else repr(value)
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    if node.op == "get_attr":
        return _held_text(attrgetter(str(node.target))(module))
    return call_text(node, numbers)


def _held_text(value: Any) -> str:
    """The text of an attribute, from its content: the same branch has different names in different
    stages."""
    if isinstance(value, GraphModule):
        return f"({text_of(value)})"
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content_of(value)).hexdigest()}"
