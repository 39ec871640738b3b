"""Process groups in graphs: collectives name the mesh dimension over which they communicate.

A traced collective names its group, and that name is valid in one process only, while the graphs
of all ranks must be equal. Groups that belong to no known mesh are numbered in order of appearance.
Every process substitutes its own names when it prepares to run.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from zbcompile.passes.capture.unsupported import COMMUNICATES_IN_A_BRANCH
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import argument_of, copy_graph, is_part, tensors_of, with_graph
from zbcompile.passes.torch_collectives import COLLECTIVES
from zbcompile.passes.torch_private import FUNCTIONAL_COLLECTIVES, OpOverload, schema_of

GROUP = "group_name"  # the argument by which collectives, and custom operators, take their group
WAIT = "wait_tensor"


def name_process_groups(module: GraphModule, dimensions: Mapping[str, str]) -> dict[str, str]:
    """Renames the process groups in a graph, in place, and returns the former name of each.

    Args:
        dimensions: The mesh dimension of each process group, by the group's name.

    Raises:
        CaptureError: A collective stands in a branch, which not all ranks need to take.
    """
    for child in module.modules():
        if isinstance(child, GraphModule) and child is not module:
            for node in filter(is_collective, child.graph.nodes):
                raise CaptureError(COMMUNICATES_IN_A_BRANCH.format(operator=node.target))
    labels: dict[str, str] = {}
    for node in filter(is_collective, module.graph.nodes):
        group = str(group_of(node))
        if group not in labels:
            number = sum(name not in dimensions for name in labels)
            labels[group] = dimensions.get(group, f"group{number}")
        set_group(node, labels[group])
    return {label: group for group, label in labels.items()}


def with_process_groups(module: GraphModule, names: Mapping[str, str]) -> GraphModule:
    """Returns a graph whose collectives name the groups of this process; itself if it has none."""
    if not any(map(is_collective, module.graph.nodes)):
        return module
    graph = copy_graph(module.graph)
    for node in filter(is_collective, graph.nodes):
        set_group(node, names[str(group_of(node))])
    return with_graph(module, graph)


def groups_of_meshes(meshes: Iterable[Any]) -> dict[str, str]:
    """Maps the name of the process group of each named mesh dimension to the dimension."""
    dimensions: dict[str, str] = {}
    for mesh in meshes:
        for index, dimension in enumerate(mesh.mesh_dim_names or ()):
            dimensions.setdefault(mesh.get_group(index).group_name, dimension)
    return dimensions


def group_of(node: Node) -> Any:
    """Returns the process group that a node communicates over; None for other nodes."""
    return argument_of(node, GROUP) if isinstance(node.target, OpOverload) else None


def set_group(node: Node, group: str) -> None:
    """Changes the process group of a collective."""
    position = [argument.name for argument in schema_of(node.target).arguments].index(GROUP)
    if position < len(node.args):
        node.update_arg(position, group)
    else:
        node.update_kwarg(GROUP, group)


def collective_name(node: Node) -> str:
    """Returns the name of a functional collective, such as `all_reduce`; "" for other nodes."""
    target = node.target
    if isinstance(target, OpOverload) and target.namespace in COLLECTIVES:
        return str(target.overloadpacket.__name__)
    return ""


def is_wait(node: Node) -> bool:
    """Returns True for the wait at the end of a collective."""
    return collective_name(node) == WAIT


def is_collective(node: Node) -> bool:
    """Returns True for a node that begins a communication."""
    return group_of(node) is not None


def is_async_collective(node: Node) -> bool:
    """Returns True if a node's result is that of a collective that is still running. Custom
    operators wait for theirs."""
    return getattr(node.target, "namespace", "") in FUNCTIONAL_COLLECTIVES and not is_wait(node)


def is_running(node: Node) -> bool:
    """Returns True for the result of a collective that nothing has waited for, and views of it."""
    while is_part(node):
        node = node.all_input_nodes[0]
    return is_async_collective(node)


def exchanged_bytes(node: Node) -> int:
    """Returns the bytes that a collective takes or returns, whichever are more."""
    operands = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
    return max(sum(tensor.nbytes for tensor in tensors) for tensors in (operands, tensors_of(node)))
