"""The uses of a value through which gradients flow."""

from torch.fx import Node
from torch.fx.node import map_arg


def count_uses(node: Node) -> int:
    """How many reads of a value a gradient flows through."""
    return sum(_flat(user).count(node) for user in node.users if is_use(user))


def is_use(user: Node) -> bool:
    """Whether a gradient flows back through an operation to what it reads."""
    return user.op == "call_function" and bool(user.meta.get("differentiable"))


def _flat(user: Node) -> list[Node]:
    """The nodes that an operation reads, each as often as it is read."""
    read: list[Node] = []
    map_arg((user.args, user.kwargs), read.append)
    return read
