"""A weight gradient that ends with a sum over ranks is summed once per step instead of once per microbatch.

Under sequence parallelism every rank computes a part of the gradient of a norm's weight, and autograd sums the parts at
once. The sum of sums is the sum over ranks of what each has accumulated, so W only accumulates, and the runtime reduces
`.grad` at the end.
"""

from collections.abc import Collection
from dataclasses import replace

from torch.fx import Node

from zbcompile.passes.graph.process_groups import group_of, is_numbered, is_wait
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.simplify import copy_joint, replace_nodes


def defer_sums(joint: Joint, several: Collection[str]) -> Joint:
    """`joint` without the sums at the ends of its weight gradients; `deferred` says along which dimension each is left
    to do. Parameters of `several` stages keep theirs: all stages would have to agree."""
    joint = copy_joint(joint)
    ends: dict[str, list[Node | None]] = {}
    for slot, node in joint.outputs:
        if slot.kind == "gradient" and slot.name not in several:
            ends.setdefault(slot.name, []).append(_sum_behind(node))
    deferred: dict[str, str] = {}
    gone: dict[Node, Node] = {}
    for name, waits in ends.items():
        groups = {str(group_of(wait.args[0])) if wait else "" for wait in waits}  # type: ignore[arg-type]
        if len(groups) == 1 and "" not in groups:
            deferred[name] = groups.pop()
            for wait in {wait for wait in waits if wait is not None}:
                gone[wait] = _without_sum(wait)
    return replace(replace_nodes(joint, gone), deferred=deferred)


def _sum_behind(node: Node) -> Node | None:
    """The wait for a sum of which a gradient is a view, if nothing else reads it."""
    while is_view(node) and len(node.users) == 1 and isinstance(node.args[0], Node):
        node = node.args[0]
    if not is_wait(node) or len(node.users) != 1:
        return None
    issued = node.args[0]
    summed = isinstance(issued, Node) and "all_reduce" in str(issued.target) and issued.args[1] == "sum"
    return node if summed and len(issued.users) == 1 and not is_numbered(group_of(issued)) else None  # type: ignore[union-attr, arg-type]


def _without_sum(wait: Node) -> Node:
    """Take the exchange out of the graph; return what it would have summed."""
    issued = wait.args[0]
    part = issued.args[0]  # type: ignore[union-attr]
    wait.replace_all_uses_with(part)  # type: ignore[arg-type]
    wait.graph.erase_node(wait)
    wait.graph.erase_node(issued)  # type: ignore[arg-type]
    return part  # type: ignore[return-value]
