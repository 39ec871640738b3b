"""Sources: a backward operation gets the source line and module of the forward operation that it differentiates.

Autograd remembers which grad_fn a forward operation made, so each grad_fn is marked with its forward node, and a
pre-hook on it passes that node's description to whatever is traced while it runs. The sum of two gradients, which
autograd forms after one grad_fn and before the next, is described like the gradient that was added last.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.autograd.graph import Node as GradFn
from torch.fx import Interpreter, Node
from torch.fx.traceback import get_current_meta

from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import SOURCE_KEYS, source_of

_MARK = "zbcompile.source"


class MarkingInterpreter(Interpreter):
    """Runs a forward graph and marks every grad_fn with the node that made it."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for tensor in tensors_of(value) if n.op == "call_function" else ():
            _mark(tensor, n)
        return value


def _mark(tensor: torch.Tensor, source: Node) -> None:
    """Mark the new grad_fns behind `tensor`: an operation may make several."""
    queue = [tensor.grad_fn]
    while queue:
        grad_fn = queue.pop()
        if grad_fn is None:
            continue
        metadata = cast(dict[str, Any], grad_fn.metadata)  # torch's stub declares a method
        if _MARK in metadata:
            continue
        metadata[_MARK] = source
        _describe_before(grad_fn, source_of(source))
        queue.extend(following for following, _ in grad_fn.next_functions)


def _describe_before(grad_fn: GradFn, description: dict[str, Any]) -> None:
    def describe(gradients: Any) -> None:
        forget_description()
        get_current_meta().update(description)

    grad_fn.register_prehook(describe)


def forget_description() -> None:
    for key in SOURCE_KEYS:
        get_current_meta().pop(key, None)


@contextlib.contextmanager
def described_backward() -> Iterator[None]:
    """Around the backward of what a MarkingInterpreter ran, inside `torch.fx.traceback.preserve_node_meta()`."""
    try:
        yield
    finally:
        forget_description()
