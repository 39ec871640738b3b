"""Operators by name: the allow-list of what a graph read from a file may call.

A saved program is data. The only functions it can name are torch's own tensor operators (`aten`, `prims`), its
functional collectives (whose groups are dimensions of a mesh), the higher-order operators below, `getitem`, and
operators of other libraries that the reader has named beforehand. Of torch's own only those whose effect is their
result: not those that set a seed, a mode or the metadata of a tensor.
"""

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
    returns_tensors,
)

OWN_LIBRARIES = ("aten", "prims", *FUNCTIONAL_COLLECTIVES)
HIGHER_ORDER = ("cond",)
GETITEM = "getitem"
CHECKS = ("_assert_async", "_assert_scalar", "_assert_tensor_metadata")  # return nothing, and change nothing
_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")  # library.operator.overload


def name_of_operator(target: Any) -> str:
    """The name under which a graph's target is written, such as `aten.linear.default`.

    Raises CompileError for a function that no reader could find by name.
    """
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator) and target.name() in HIGHER_ORDER:
        return f"higher_order.{target.name()}"
    raise CompileError(
        f"{target} cannot be saved: a program holds aten, prims and library operators, getitem and "
        f"{', '.join(HIGHER_ORDER)}. Wrap it with torch.library.custom_op."
    )


def is_foreign(name: str) -> bool:
    """Whether an operator belongs to a library other than torch's own, so that a reader must name it."""
    return name != GETITEM and name.partition(".")[0] not in (*OWN_LIBRARIES, "higher_order")


def operator_named(name: str, foreign: Collection[str] = ()) -> Callable[..., Any]:
    """The operator that `name_of_operator` wrote. `foreign` are the names of other libraries' operators that may be
    called, without the overload: `mylibrary::scale`.

    Raises CompileError for everything else, whether it exists or not.

    >>> operator_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    if name == GETITEM:
        return operator.getitem
    if name in {f"higher_order.{allowed}" for allowed in HIGHER_ORDER}:
        return getattr(torch.ops.higher_order, name.partition(".")[2])  # type: ignore[no-any-return]
    if not _NAME.fullmatch(name):
        raise CompileError(f"{name!r} is not the name of an operator; expected library.operator.overload.")
    library, function, overload = name.split(".")
    if library not in OWN_LIBRARIES and f"{library}::{function}" not in foreign:
        raise CompileError(
            f"the program calls {library}::{function}, which is not an operator of torch. If you trust it, import the "
            f'module that defines it and pass operators=["{library}::{function}"].'
        )
    found = _found(library, function, overload)
    if library in OWN_LIBRARIES and function not in CHECKS:
        _require_pure(name, found)
    return found  # type: ignore[no-any-return]


def _found(library: str, function: str, overload: str) -> Any:
    try:
        return getattr(getattr(getattr(torch.ops, library), function), overload)
    except AttributeError:
        raise CompileError(
            f"the program calls {library}::{function} ({overload}), which is not defined here. Import the module that "
            "defines it before loading."
        ) from None


def _require_pure(name: str, found: Any) -> None:
    """Refuse operators of aten that map files, or have another effect than the tensors that they return or write."""
    if (
        not isinstance(found, OpOverload)
        or any(argument.name == "filename" for argument in arguments_of(found))
        or not returns_tensors(found)
        or torch.Tag.inplace_view in found.tags
    ):
        raise CompileError(f"{name} is not an operator that a program may call.")
