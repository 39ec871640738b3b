"""What a graph that was read allocates: the written values are compared with those that its operations make.

Sizes are believed nowhere else: memory is counted from the values, so a graph whose operations make more than it says
is refused before it runs.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import FakeTensorMode, HigherOrderOperator


def require_true_values(module: GraphModule, mode: FakeTensorMode) -> None:
    """Run a graph on its fake inputs. Raises CompileError for an operation that makes another dtype, shape or size than
    is written, or whose size depends on data."""
    found: dict[Node, Any] = {}
    with mode, torch.no_grad():
        for node in module.graph.nodes:
            written = node.meta.get("val")
            if node.op == "get_attr":
                value = getattr(module, node.target)
                found[node] = value if isinstance(value, torch.nn.Module) else written
                _require_same(node, value, written)
            elif node.op == "call_function":
                found[node] = _made(node, found)
                _require_same(node, found[node], written)
            else:
                found[node] = written


def _made(node: Node, found: dict[Node, Any]) -> Any:
    """What an operation makes. The branches of a higher-order one were compared when they were read."""
    if isinstance(node.target, HigherOrderOperator):
        return node.meta.get("val")
    args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise CompileError(f"{node.name} ({node.target}) cannot run on what is written: {first}") from None


def _require_same(node: Node, value: Any, written: Any) -> None:
    ours, theirs = tensors_of(value), tensors_of(written)
    if list(map(_form, ours)) != list(map(_form, theirs)):
        raise CompileError(f"{node.name} ({node.target}) is not of the dtype and shape that are written for it.")


def _form(value: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return value.dtype, value.shape
