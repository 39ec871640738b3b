"""Dtypes, layouts and memory formats of torch by name, from closed tables."""

from collections.abc import Mapping
from typing import Any

import torch

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import tensors_of

_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
NAMED: Mapping[str, Mapping[str, Any]] = {
    tag: {name: value for name, value in vars(torch).items() if isinstance(value, kind)}
    for tag, kind in _KINDS.items()
}


def named(tag: str, name: Any) -> Any:
    """A dtype, layout or memory format of torch; `tag` is a key of NAMED. Raises CompileError for
    any other name.

    >>> named("layout", "strided")
    torch.strided
    """
    value = NAMED[tag].get(name) if isinstance(name, str) else None
    if value is None:
        raise CompileError(f"torch has no {tag} {name!r}.")
    return value


def dtype_named(name: str) -> torch.dtype:
    """A dtype of torch. Raises CompileError for any other name.

    >>> dtype_named("bfloat16")
    torch.bfloat16
    """
    return named("dtype", name)  # type: ignore[no-any-return]


def name_in_torch(value: Any) -> tuple[str, str] | None:
    """The tag and the name under which `named` finds a dtype, layout or memory format; None for
    anything else."""
    tag = next((tag for tag, kind in _KINDS.items() if isinstance(value, kind)), None)
    return None if tag is None else (tag, str(value).removeprefix("torch."))


def type_text(value: torch.Tensor) -> str:
    """Dtype and shape, as in `float32[2, 64]`."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def tensor_types(*values: Any) -> str:
    """Returns dtype and shape of the tensors in `values`: `(float32[2, 8], int64[2])`."""
    return f"({', '.join(map(type_text, tensors_of(values)))})"
