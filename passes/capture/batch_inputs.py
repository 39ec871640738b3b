"""The batch of a step: its tensors are inputs of the graph, other values are constants in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.capture.structures import TensorPosition
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
        leaves: The constants, and a position in place of every tensor.
    """

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, batch: tuple[Any, Any, Any]) -> "BatchStructure":
        """Returns the structure of a batch.

        Raises:
            CaptureError: The batch contains a value that is neither a tensor nor a constant.
        """
        paths, leaves = list[str](), list[Any]()
        for path, leaf in leaves_with_paths(batch):
            if isinstance(leaf, Tensor):
                leaves.append(TensorPosition(len(paths)))
                paths.append(path)
            elif isinstance(leaf, _CONSTANTS):
                leaves.append(leaf)
            else:
                raise CaptureError(UNKNOWN_INPUT.format(path=path, kind=type(leaf).__name__))
        return cls(tuple(paths), tuple(leaves), pytree.tree_structure(batch))

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        """Returns `(args, kwargs, target)` with these tensors."""
        leaves = [
            tensors[leaf.index] if isinstance(leaf, TensorPosition) else leaf
            for leaf in self.leaves
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
