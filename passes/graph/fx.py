"""Questions about the nodes of an FX graph that every pass asks."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.torch_private import LazyGraphModule, OpOverload, arguments_of


def output_values(graph: Graph) -> list[Any]:
    """What a graph returns, as a flat list of nodes (or constants)."""
    (values,) = graph.output_node().args
    return list(values) if isinstance(values, tuple | list) else [values]


def is_getitem(node: Node) -> bool:
    """Whether a node takes one value out of a tuple."""
    return node.target is operator.getitem


def operator_name(node: Node) -> str:
    """As torch names the node of a call in a trace."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else "getitem"


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers. Such a node moves the generator: never dropped, copied
    or reordered."""
    return draws(node.target, node.args, node.kwargs)


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers."""
    if (
        not isinstance(operation, OpOverload)
        or torch.Tag.nondeterministic_seeded not in operation.tags
    ):
        return False
    dropped = _argument(operation, args, kwargs, "dropout_p", 1.0)
    return bool(dropped != 0.0)  # attention without dropout carries the tag but draws nothing


def argument_of(node: Node, name: str, missing: Any) -> Any:
    """The value of an argument of an operator call, or its default; `missing` if the operator has
    none of that name."""
    return _argument(node.target, node.args, node.kwargs, name, missing)


def _argument(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, missing: Any
) -> Any:
    for index, declared in enumerate(arguments_of(operation)):
        if declared.name == name:
            return kwargs.get(name, args[index] if index < len(args) else declared.default_value)
    return missing


def nodes_behind(
    nodes: Iterable[Node], wanted: Callable[[Node], bool] = lambda node: True
) -> set[Node]:
    """The `wanted` ones among `nodes`, and those that they depend on through wanted ones."""
    found: set[Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in found and wanted(node):
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def operations_behind(nodes: Iterable[Node]) -> set[Node]:
    """The operations among `nodes` and all operations that they depend on."""
    return nodes_behind(nodes, lambda node: node.op == "call_function")


def copied(graph: Graph, copies: dict[Node, Node] | None = None) -> Graph:
    """A copy of a graph; `copies` receives what became of each node."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {} if copies is None else copies))
    return copy


def with_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """`module` with another graph: the same attributes, under the same name."""
    return LazyGraphModule(module, graph, class_name=type(module).__name__)


class NodeNumber(str):
    """A node in a printed argument list; never equal to a string there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def node_numbers(graph: Graph) -> dict[Node, NodeNumber]:
    """Numbers for nodes in order of appearance, equal for two graphs that differ only in names."""
    return {node: NodeNumber(f"%{i}") for i, node in enumerate(graph.nodes)}


def call_text(node: Node, numbers: Mapping[Node, NodeNumber]) -> str:
    """An operation with its arguments, the nodes among them by number."""
    return f"{node.target} {map_arg((node.args, node.kwargs), numbers.__getitem__)!r}"  # type: ignore[arg-type]


def on_any_device(text: str) -> str:
    """The text of operations without device indices, which differ from rank to rank.

    >>> on_any_device("aten.ones.default([2], device = device(type='cuda', index=1))")
    "aten.ones.default([2], device = device(type='cuda'))"
    """
    return re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", text)


def like(
    value: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """An uninitialised tensor with the shape and strides of `value`, and its dtype and device
    unless others are given.

    Inside a fake tensor mode the result is a fake of that mode, whichever mode `value` comes from.
    """
    kind, place = dtype or value.dtype, device or value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=kind, device=place)
