"""The names of torch.distributed that the exported step needs.

Nothing here imports the package unless the process has done so: it takes a second, and not every
build of torch has it.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.torch_private import replaced

# Namespaces of torch.distributed._functional_collectives and of DTensor's own collectives.
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")

# In-place collectives of torch.distributed and the functional ones that Dynamo replaces them by.
_FUNCTIONAL_COLLECTIVES = {
    "all_reduce": "all_reduce_inplace",
    "all_gather_into_tensor": "all_gather_tensor_inplace",
    "reduce_scatter_tensor": "reduce_scatter_tensor_inplace",
    "all_to_all_single": "all_to_all_inplace",
    "all_gather": "all_gather_inplace",
}


@contextlib.contextmanager
def functional_collectives() -> Iterator[None]:
    """Context in which in-place collectives are functional ones, which a graph can hold.

    Names that other modules have imported (`from torch.distributed import all_reduce`) are replaced
    as well.
    """
    with contextlib.ExitStack() as stack:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            functional = importlib.import_module("torch.distributed._functional_collectives")
            functions = {
                id(getattr(torch.distributed, name)): _without_work(
                    functional, getattr(functional, replacement), name
                )
                for name, replacement in _FUNCTIONAL_COLLECTIVES.items()
            }
            for module_name, module in list(sys.modules.items()):
                if module_name == "torch.distributed" or not module_name.startswith("torch."):
                    for key, value in list(getattr(module, "__dict__", {}).items()):
                        if id(value) in functions:
                            stack.enter_context(replaced(module, key, functions[id(value)]))
        yield


def is_dtensor(value: Any) -> bool:
    """Returns True for a DTensor. The package that defines it takes a second to import, and is
    imported wherever a DTensor exists."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


class _FinishedWork:
    """Result of a collective with `async_op=True`; the graph has the wait before its first use."""

    def wait(self) -> bool:
        return True


def _without_work(functional: Any, function: Any, name: str) -> Any:
    from zbcompile.passes.capture.unsupported import PLAIN_COLLECTIVE
    from zbcompile.passes.graph.source_location import users_line

    words = {str(operation): word for operation, word in functional.REDUCE_OP_TO_STR.items()}

    def in_words(value: Any) -> Any:
        return value if isinstance(value, Tensor | list) else words.get(str(value), value)

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> _FinishedWork | None:
        seen = any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
        if seen and torch.is_grad_enabled():
            line = users_line(sys._getframe(1))
            raise CaptureError(PLAIN_COLLECTIVE.format(name=name, line=line))
        function(*map(in_words, args), **{name: in_words(value) for name, value in kwargs.items()})
        return _FinishedWork() if async_op else None

    return call
