"""Process groups in graphs. A functional collective names its group, and that name is valid in one process only, while
the graphs must be equal on all ranks. So graphs say `group0`, `group1`, in order of appearance, and every process
substitutes its own names when it prepares to run.
"""

from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import FUNCTIONAL_COLLECTIVES, LazyGraphModule, OpOverload, arguments_of

WAIT = "wait_tensor"


def is_collective(node: Node) -> bool:
    """Whether a node is a functional collective, or waits for one."""
    return isinstance(node.target, OpOverload) and node.target.namespace in FUNCTIONAL_COLLECTIVES


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return is_collective(node) and node.target.overloadpacket.__name__ == WAIT  # type: ignore[union-attr]


def is_under_way(node: Node) -> bool:
    """Whether a node's result comes from a collective that has been issued but not yet waited for."""
    return is_collective(node) and not is_wait(node)


def name_groups(module: GraphModule) -> tuple[str, ...]:
    """Rename the process groups in the graph, in place; return the former names, of which the i-th is now `group<i>`.

    Raises CaptureError for a collective inside a branch (torch.cond), which not all ranks of its group need take.
    """
    _refuse_in_branches(module)
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        at = _group_argument(node)
        if at is not None:
            _require_name(node, node.args[at])
            node.update_arg(at, found.setdefault(str(node.args[at]), f"group{len(found)}"))
    return tuple(found)


def with_groups(module: GraphModule, names: Sequence[str]) -> GraphModule:
    """The graph with this process's names of its groups; `module` itself if it has no groups."""
    if not any(_group_argument(node) is not None for node in module.graph.nodes):
        return module
    own = {f"group{i}": name for i, name in enumerate(names)}
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        at = _group_argument(node)
        if at is not None:
            node.update_arg(at, own[str(node.args[at])])
    return LazyGraphModule(module, graph, class_name=type(module).__name__)


def group_of(node: Node) -> object:
    """The name of the group of a collective; None for anything else."""
    at = _group_argument(node)
    return None if at is None else node.args[at]


def _group_argument(node: Node) -> int | None:
    """The index of the argument of a collective that is its group."""
    if not is_collective(node):
        return None
    names = [argument.name for argument in arguments_of(node.target)]  # type: ignore[arg-type]
    return names.index("group_name") if "group_name" in names else None


def _require_name(node: Node, group: object) -> None:
    if not isinstance(group, str):
        raise CaptureError(
            f"{node.target} got its process group as a {type(group).__name__}; a graph can hold only the group's name. "
            "Switch torch.distributed.config.compile_on_one_rank off."
        )


def _refuse_in_branches(module: GraphModule) -> None:
    inner = [child for child in module.modules() if isinstance(child, GraphModule) and child is not module]
    for node in (node for child in inner for node in child.graph.nodes):
        if is_collective(node):
            raise CaptureError(
                f"{node.target} is inside a branch of the model (torch.cond, or another control flow operator); "
                "the ranks of its group might not all take that branch, and would wait for ever. Move it out."
            )
