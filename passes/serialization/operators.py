"""The operations that a written graph may name: a closed table, so that no name reaches anything but an operator."""

import operator
import re
from collections.abc import Callable, Collection
from typing import Any

import torch

from zbcompile.passes.errors import CompileError
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    HigherOrderOperator,
    OpOverload,
    arguments_of,
    known_operator,
    result_types,
)

OWN_LIBRARIES = ("aten", "prims", "zbcompile", *FUNCTIONAL_COLLECTIVES)
HIGHER_ORDER = {"higher_order.cond": torch.ops.higher_order.cond}
GETITEM = "getitem"
CHECKS = ("_assert_async", "_assert_scalar", "_assert_tensor_metadata")  # return nothing, and change nothing
SILENT = tuple(f"aten.{name}" for name in CHECKS)
MESSAGES = ("batch_p2p_ops", "irecv", "isend")  # between two ranks, of which the other need not answer
_NAME = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\.([A-Za-z]\w*)", re.ASCII)  # library.operator.overload


def name_of_operator(target: Any) -> str:
    """The name under which a graph's target is written, such as `aten.linear.default`.

    Raises CompileError for a function that no reader could find by name.
    """
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator) and (name := f"higher_order.{target.name()}") in HIGHER_ORDER:
        return name
    raise CompileError(
        f"{target} cannot be saved: a program holds aten, prims and library operators, getitem and "
        f"{', '.join(HIGHER_ORDER)}. Wrap it with torch.library.custom_op."
    )


def is_foreign(name: str) -> bool:
    """Whether an operator belongs to a library other than torch's own, so that a reader must name it."""
    return name != GETITEM and name.partition(".")[0] not in (*OWN_LIBRARIES, "higher_order")


def operator_named(name: Any, foreign: Collection[str] = ()) -> Callable[..., Any]:
    """The operator that `name_of_operator` wrote. `foreign` are the names of other libraries' operators that may be
    called, without the overload: `mylibrary::scale`.

    It is an overload that the dispatcher knows, getitem or one of HIGHER_ORDER. Raises CompileError for everything
    else, whether it exists or not.

    >>> operator_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    if name == GETITEM:
        return operator.getitem
    if isinstance(name, str) and name in HIGHER_ORDER:
        return HIGHER_ORDER[name]
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise CompileError(f"{name!r} is not the name of an operator that a program may call.")
    library, function, overload = parts.groups()
    if library not in OWN_LIBRARIES and f"{library}::{function}" not in foreign:
        raise CompileError(
            f"the program calls {library}::{function}, which is not an operator of torch. If you trust it, import the "
            f'module that defines it and pass operators=["{library}::{function}"].'
        )
    found = known_operator(library, function, overload)
    if found is None:
        raise CompileError(
            f"{name} is not an operator that a program may call: nothing here defines {library}::{function} with an "
            f"overload {overload}. If a module of yours does, import it before loading."
        )
    if library in OWN_LIBRARIES and f"{library}.{function}" not in SILENT and not _is_pure(library, function, found):
        raise CompileError(f"{name} is not an operator that a program may call.")
    return found


def _is_pure(library: str, function: str, found: OpOverload) -> bool:
    """Whether an operator of torch has no effect besides the tensors that it returns or writes, and maps no file."""
    return (
        any("Tensor" in kind for kind in result_types(found))
        and all(argument.name != "filename" for argument in arguments_of(found))
        and torch.Tag.inplace_view not in found.tags
        and library != "zbcompile"
        and function not in MESSAGES
    )
