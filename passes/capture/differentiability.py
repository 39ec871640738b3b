"""Probing: which operations of a captured graph autograd cannot differentiate, and where gradients stop."""

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import is_getitem, like
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import HigherOrderOperator, OpOverload, single_threaded_backward

aten = torch.ops.aten
_OF_ONE_DTYPE = {
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default),
    *(aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
}


def operations_without_backward(canonical: Canonical) -> list[str]:
    """A sentence for each operation that a gradient must pass and cannot. Runs each of them alone, on fake tensors."""
    found: dict[str, str] = {}
    for node in canonical.graph.nodes:
        if node.op == "call_function" and str(node.target) not in found and _carries_gradient(node):
            error = _failure(canonical, node)
            if error:
                names = {"operation": node.target, "line": described(node), "error": error}
                found[str(node.target)] = Refusal.NO_DERIVATIVE.text(**names)
    return list(found.values())


def gradient_stops(canonical: Canonical) -> list[str]:
    """Where a value that depends on parameters loses its gradient, although the model did not detach it."""
    return [
        f"no gradient flows through {node.target} ({described(node)})"
        for node in canonical.graph.nodes
        if node.op == "call_function"
        and not node.meta["differentiable"]
        and not is_getitem(node)
        and not str(node.target).startswith("aten.detach")
        and any(argument.meta.get("differentiable") for argument in node.all_input_nodes)
    ]


def loss_problems(canonical: Canonical) -> list[str]:
    """Why no gradient starts from the loss; empty if one does."""
    (loss,) = (node for slot, node in canonical.outputs if slot.kind == "loss")
    if loss.meta["differentiable"]:
        return []
    stops = "; ".join(gradient_stops(canonical)) or "it depends on no trainable parameter"
    return [Refusal.LOSS_WITHOUT_GRADIENT.text(stops=stops)]


def mixed_dtypes(canonical: Canonical) -> list[str]:
    """A sentence for the first product of two dtypes: torch.export lets it pass, but no kernel computes it."""
    for node in canonical.graph.nodes:
        if node.target in _OF_ONE_DTYPE:
            found = {str(t.dtype) for argument in node.all_input_nodes for t in tensors_of(argument.meta["val"])}
            if len(found) > 1:
                kinds = " and ".join(sorted(name.removeprefix("torch.") for name in found))
                return [Refusal.MIXED_DTYPES.text(operation=node.target, dtypes=kinds, line=described(node))]
    return []


def described(node: Node) -> str:
    """The line of the model that a node comes from."""
    origin = origin_of(node)
    return str(origin) if origin else node.name


def _carries_gradient(node: Node) -> bool:
    return bool(node.meta["differentiable"]) and isinstance(node.target, OpOverload | HigherOrderOperator)


def _failure(canonical: Canonical, node: Node) -> str:
    """Why the gradient of `node` alone cannot be computed; empty if it can."""
    leaves: list[torch.Tensor] = []

    def leaf(argument: Node) -> Any:
        if argument.op == "get_attr":
            return getattr(canonical.module, str(argument.target))
        return map_aggregate(argument.meta["val"], lambda value: _leaf(value, argument, leaves))  # type: ignore[arg-type]

    with canonical.mode, torch.enable_grad(), single_threaded_backward():
        args, kwargs = map_arg((node.args, node.kwargs), leaf)  # type: ignore[arg-type, misc]
        try:
            outputs = [t for t in tensors_of(node.target(*args, **kwargs)) if t.requires_grad]  # type: ignore[operator]
            wanted = [t for t in leaves if t.requires_grad]
            torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)
        except Exception as error:
            return str(error).strip().splitlines()[0]
    return ""


def _leaf(value: Any, argument: Node, leaves: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    new = like(value)
    differentiable = bool(argument.meta["differentiable"]) and (value.is_floating_point() or value.is_complex())
    leaves.append(new.requires_grad_(differentiable))
    return new


def backward_failure(canonical: Canonical, error: BaseException) -> str:
    """Why the backward could not be traced."""
    known = operations_without_backward(canonical)
    if known:
        return known[0]
    return f"the backward of the model cannot be traced ({type(error).__name__}: {str(error).splitlines()[0]})."
