"""Questions about the nodes of an FX graph that every pass asks, and copies of graphs."""

import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.torch_private import (
    UNSAFE_VIEW,
    LazyGraphModule,
    OpOverload,
    pytree,
    schema_of,
)

T = TypeVar("T")


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Returns `starts` and everything that `following` leads to from them, each once."""
    pending, visited = list(starts), dict[T, None]()
    while pending:
        current = pending.pop()
        if current not in visited:
            visited[current] = None
            pending.extend(following(current))
    return visited


def output_values(graph: Graph) -> list[Any]:
    """Returns the results of a graph as a flat list of nodes (or constants)."""
    (values,) = graph.output_node().args
    return list(values) if isinstance(values, tuple | list) else [values]


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, or the fake tensors of a node's value."""
    value = value.meta.get("val") if isinstance(value, Node) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def operator_name(node: Node) -> str:
    """Returns the name of a node's operator without namespace and overload, such as `mm`."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return getattr(target, "__name__", str(target))


def argument_of(node: Node, name: str, default: Any = None) -> Any:
    """Returns an argument of an operator call; `default` if the operator has none of that name."""
    for index, declared in enumerate(schema_of(node.target).arguments):
        if declared.name == name:
            positional = node.args[index] if index < len(node.args) else declared.default_value
            return node.kwargs.get(name, positional)
    return default


def is_view(node: Node) -> bool:
    """Returns True if the result of a node aliases its input, which it does not write."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    aliases = (result.alias_info for result in schema_of(target).returns)
    return target is UNSAFE_VIEW or any(alias and not alias.is_write for alias in aliases)


def is_part(node: Node) -> bool:
    """Returns True if a node computes nothing: a view, or one of several results."""
    return is_view(node) or operator_name(node) == "getitem"


def is_random(node: Node) -> bool:
    """Returns True if a node draws random numbers: it is never duplicated or reordered. Attention
    with `dropout_p=0` draws none."""
    if isinstance(node.target, OpOverload):
        is_tagged = torch.Tag.nondeterministic_seeded in node.target.tags
        return is_tagged and argument_of(node, "dropout_p") != 0.0
    return any(map(is_random, branch_nodes(node)))


def branch_nodes(node: Node) -> Iterator[Node]:
    """Yields the nodes of the graphs that a node calls, such as the branches of torch.cond."""
    for source in node.all_input_nodes if node.op == "call_function" else ():
        if source.op == "get_attr":
            module = getattr(source.graph.owning_module, str(source.target), None)
            if isinstance(module, GraphModule):
                yield from module.graph.nodes


def copy_graph(graph: Graph, copies: dict[Node, Node] | None = None) -> Graph:
    """Returns a copy of a graph with its metadata. `copies` receives the copy of each node."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {} if copies is None else copies))
    copied.output_node().meta = dict(graph.output_node().meta)
    return copied


def with_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """Returns `module` with another graph: the same attributes, under the same name."""
    return LazyGraphModule(module, graph, class_name=type(module).__name__)


def graph_text(module: GraphModule) -> str:
    """Returns a text that graphs share which do the same work: inputs, operators, arguments and
    the graphs that they call, without names."""
    numbers: dict[Node, _Number] = {}
    lines = []
    for node in module.graph.nodes:
        numbers[node] = _Number(f"%{len(numbers)}")
        if node.op == "get_attr":
            text = f"({graph_text(attrgetter(str(node.target))(module))})"
        elif node.op == "placeholder":
            text = "placeholder"
        else:
            text = f"{node.target} {map_arg((node.args, node.kwargs), numbers.__getitem__)!r}"
        values = [f"{v.dtype} {v.device} {tuple(v.shape)} {v.stride()}" for v in tensors_of(node)]
        lines.append(f"{numbers[node]} {text} {values}")
    return "\n".join(lines)


class _Number(str):
    """A node in a printed argument list; never equal to a string there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def on_any_device(text: str) -> str:
    """Returns the text of operations without device indices, which differ from rank to rank.

    >>> on_any_device("aten.ones.default([2], device = device(type='cuda', index=1))")
    "aten.ones.default([2], device = device(type='cuda'))"
    """
    return re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", text)


def like(value: Tensor, *, device: torch.device | None = None) -> Tensor:
    """Returns an uninitialized tensor with the shape and strides of `value`.

    Inside of a fake tensor mode the result is a fake tensor of that mode, whichever mode `value`
    comes from.
    """
    device = device or value.device
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
