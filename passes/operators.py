"""The operators that a saved graph may call: pure ones of torch, and those that the user names."""

import operator
import re
from collections.abc import Callable, Collection
from typing import Any

import torch

from zbcompile.passes.errors import CompileError
from zbcompile.passes.torch_collectives import COLLECTIVES
from zbcompile.passes.torch_private import OpOverload, OpOverloadPacket, has_kernel, schema_of

LIBRARIES = ("aten", "prims", *COLLECTIVES)
GETITEM = "getitem"
HIGHER_ORDER = {"higher_order.cond": torch.ops.higher_order.cond}
MESSAGES = frozenset({"isend", "irecv", "batch_p2p_ops"})  # the peer may not answer
_OPERATOR = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)


def operator_named(name: Any, operators: Collection[str] = ()) -> Callable[..., Any]:
    """Returns the operator that `name_of_operator` wrote.

    Args:
        operators: Operators of other libraries that a graph may call, as `library::operator`.

    Raises:
        CompileError: The name is not in the closed list, whether the operator exists or not.

    >>> operator_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    if name == GETITEM:
        return operator.getitem
    if isinstance(name, str) and name in HIGHER_ORDER:
        return HIGHER_ORDER[name]
    parts = _OPERATOR.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise CompileError(f"{name!r} is not the name of an operator that a graph may call.")
    library, function, overload = parts.groups()
    if library not in LIBRARIES and f"{library}::{function}" not in operators:
        raise CompileError(
            f"the graph calls {library}::{function}, which is not an operator of torch. If you "
            "trust it, import the module that defines it and pass "
            f'operators=["{library}::{function}"].'
        )
    overload_object = _dispatcher_operator(library, function, overload)
    if overload_object is None or (
        library in LIBRARIES and not _is_allowed(overload_object, function)
    ):
        raise CompileError(f"{name} is not an operator that a graph may call.")
    return overload_object


def name_of_operator(target: Any) -> str:
    """Returns the name of a graph's target, such as `aten.mm.default`."""
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, OpOverload):
        return str(target)
    for name, higher_order in HIGHER_ORDER.items():
        if target is higher_order:
            return name
    raise CompileError(f"{target} cannot be saved. Wrap it with torch.library.custom_op.")


def _is_allowed(overload: OpOverload, function: str) -> bool:
    """Returns True if an operator of torch only computes tensors, and reads no file."""
    schema = schema_of(overload)
    return (
        any("Tensor" in str(result.type) for result in schema.returns)
        and all(argument.name != "filename" for argument in schema.arguments)
        and torch.Tag.inplace_view not in overload.tags
        and function not in MESSAGES
    )


def _dispatcher_operator(library: str, function: str, overload: str) -> OpOverload | None:
    """Returns the operator that the dispatcher knows under this name.

    None for anything else that `torch.ops` has: attributes, methods, operators of TorchScript.
    """
    packet = getattr(getattr(torch.ops, library), function, None)
    if not isinstance(packet, OpOverloadPacket) or overload not in packet.overloads():
        return None
    candidate = getattr(packet, overload)
    is_operator = isinstance(candidate, OpOverload) and has_kernel(candidate)
    return (
        candidate if is_operator and str(candidate) == f"{library}.{function}.{overload}" else None
    )
