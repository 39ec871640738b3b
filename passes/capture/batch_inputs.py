"""The batch of a step: its tensors are inputs of the graph, other values are constants in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.capture.unsupported import UNKNOWN_INPUT
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import pytree

_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), slice, Enum, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(FunctionType, BuiltinFunctionType),
)


@dataclass(frozen=True)
class BatchStructure:
    """A batch `(args, kwargs, target)` without its tensors.

    Attributes:
        paths: Of the tensors: `args[0]`, `kwargs['mask']`, `target`.
        constants: The leaves, None in place of tensors.
        is_tensor: Whether each leaf is a tensor.
    """

    paths: tuple[str, ...]
    constants: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    spec: Any

    @classmethod
    def of(cls, batch: tuple[Any, Any, Any]) -> "BatchStructure":
        """Returns the structure of a batch.

        Raises:
            CaptureError: The batch contains a value that is neither a tensor nor a constant.
        """
        leaves = leaves_with_paths(batch)
        for path, leaf in leaves:
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise CaptureError(UNKNOWN_INPUT.format(path=path, kind=type(leaf).__name__))
        is_tensor = tuple(isinstance(leaf, Tensor) for _, leaf in leaves)
        paths = tuple(path for path, leaf in leaves if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves)
        return cls(paths, constants, is_tensor, pytree.tree_structure(batch))

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        """Returns `(args, kwargs, target)` with these tensors."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        args, kwargs, target = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, target


def leaves_with_paths(batch: tuple[Any, Any, Any]) -> list[tuple[str, Any]]:
    """Returns the leaves of `(args, kwargs, target)` by path."""
    args, kwargs, target = batch
    return [
        (f"{root}{pytree.keystr(path)}", leaf)
        for root, value in (("args", args), ("kwargs", kwargs), ("target", target))
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
    ]
