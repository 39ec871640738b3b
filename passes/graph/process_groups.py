"""Process groups in graphs. A collective names its group, and that name is valid in one process
only, while the graphs must be equal on all ranks. So graphs call a group of the mesh by its
dimension ("tp") and any other `group0`, `group1`, in order of appearance, and every process
substitutes its own names when it prepares to run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.graph.fx import copied, with_graph
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import FUNCTIONAL_COLLECTIVES, OpOverload, arguments_of

WAIT = "wait_tensor"
GROUP = (  # the argument by which functional collectives, and custom operators, take their group
    "group_name"
)


def is_collective(node: Node) -> bool:
    """Whether a node communicates with a group, or waits for such a communication."""
    return _is_functional(node) or _has_group(node)


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return _is_functional(node) and node.target.overloadpacket.__name__ == WAIT  # type: ignore[union-attr]


def is_under_way(node: Node) -> bool:
    """Whether a node's result is that of a collective that is still running. A custom operator
    waits for its own."""
    return _is_functional(node) and not is_wait(node)


def _is_functional(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in FUNCTIONAL_COLLECTIVES


def with_groups(module: GraphModule, names: Mapping[str, str]) -> GraphModule:
    """The graph with this process's `names` of its groups; `module` itself if it has no groups."""
    if not any(map(_has_group, module.graph.nodes)):
        return module
    graph = copied(module.graph)
    for node in filter(_has_group, graph.nodes):
        _rename(node, names[str(group_of(node))])
    return with_graph(module, graph)


def exchanged_bytes(node: Node) -> int:
    """The bytes that a collective takes or returns, whichever are more."""
    given = [
        tensor for source in node.all_input_nodes for tensor in tensors_of(source.meta.get("val"))
    ]
    return max(
        sum(t.nbytes for t in given), sum(t.nbytes for t in tensors_of(node.meta.get("val")))
    )


def group_of(node: Node) -> Any:
    """The name of the group of a collective; None for anything else."""
    if not _has_group(node):
        return None
    at = _position(node)
    return node.args[at] if at < len(node.args) else node.kwargs.get(GROUP)


def groups_in(graph: Graph) -> Iterator[str]:
    """The names of the groups in a graph."""
    yield from (str(group_of(node)) for node in graph.nodes if _has_group(node))


def _has_group(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and any(
        a.name == GROUP for a in arguments_of(node.target)
    )


def _position(node: Node) -> int:
    return [argument.name for argument in arguments_of(node.target)].index(GROUP)  # type: ignore[arg-type]


def _rename(node: Node, name: str) -> None:
    if _position(node) < len(node.args):
        node.update_arg(_position(node), name)
    else:
        node.update_kwarg(GROUP, name)
