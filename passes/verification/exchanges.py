"""What a collective of a graph does, as far as it decides which values are equal afterwards."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.graph.fx import argument_of, like
from zbcompile.passes.graph.process_groups import GROUP, group_of, is_under_way
from zbcompile.passes.graph.row_exchanges import EXCHANGE_ROWS
from zbcompile.passes.torch_private import FakeTensorMode, OpOverload, arguments_of, custom_kernel, pytree

What = Literal["sum", "largest", "gather", "scatter", "permute", "none"]


class Exchange(NamedTuple):
    """`what` is done, and whether parts are `summed`. "none": an operator that takes a group and leaves it alone."""

    what: What
    summed: bool = False


_KINDS: Mapping[str, What] = {
    "all_reduce": "sum",
    "all_gather": "gather",
    "broadcast": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "permute",
}


def exchange_of(node: Node, groups: Mapping[str, str]) -> Exchange | None:
    """What a collective does; None if that is not known. `groups` has this process's name of each group of the graph.

    The kernel of a custom operator written in Python is run on fake tensors: what it would exchange is noted.
    """
    assert isinstance(node.target, OpOverload)
    if is_under_way(node):
        return _named(node.target.overloadpacket.__name__, str(argument_of(node, "reduce_op", "sum")))
    if node.target is EXCHANGE_ROWS:
        return Exchange("permute")
    kernel, group = custom_kernel(node.target), groups.get(str(group_of(node)))
    if kernel is None or group is None:
        return None
    watch = _Watch()
    args, kwargs = pytree.tree_map_only(Node, lambda each: each.meta["val"], (node.args, dict(node.kwargs)))
    names = [each.name for each in arguments_of(node.target)]
    given = dict(zip(names, args, strict=False)) | kwargs | {GROUP: group}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), watch:
            kernel(**pytree.tree_map_only(torch.Tensor, like, given))
    except Exception:  # of a kernel that needs values nothing is known
        return None
    if len(watch.seen) > 1:
        return None
    return watch.seen[0] if watch.seen else Exchange("none")


def _named(name: str, operation: str) -> Exchange | None:
    kind = next((what for start, what in _KINDS.items() if name.startswith(start)), None)
    summed = operation.lower().endswith("sum")
    if kind is None:
        return None
    return (
        Exchange("largest") if kind == "sum" and not summed else Exchange(kind, summed and kind in ("sum", "scatter"))
    )


class _Watch(TorchFunctionMode):
    """Notes calls of torch.distributed's collectives, and does none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Exchange | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            return func(*args, **(kwargs or {}))
        operation = next(
            (str(each) for each in (*args, *(kwargs or {}).values()) if "ReduceOp" in str(type(each))), "sum"
        )
        self.seen.append(_named(func.__name__, operation))
        return None
