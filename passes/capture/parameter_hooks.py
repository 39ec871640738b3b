"""Hooks on parameters: plain hooks become part of the step, other kinds are refused.

torch.export replaces the parameters, so hooks that the user registered on them
would be lost without a word.
"""

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.capture.unsupported import WRITES_GRAD
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import plain_hooks, version_of, without_torch_function


@contextlib.contextmanager
def traced_hooks(originals: Mapping[str, Tensor], traced: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the hooks of the original parameters are registered on the traced ones."""
    with contextlib.ExitStack() as stack:
        for name, parameter in originals.items():
            for hook in (plain_hooks(parameter) or {}).values():
                handle = traced[name].register_hook(hook)
                stack.callback(handle.remove)
        yield


def accumulation_hooks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields name and kind of hooks that run when autograd adds to `.grad`.

    A pipeline adds the gradients of microbatches itself, so such hooks never run.
    """
    for name, parameter in model.named_parameters():
        kind = _accumulation_hook(parameter)
        if kind:
            yield name, kind


class GradWrites:
    """Detects writes to `parameter.grad` inside of forward or backward.

    Nothing of them would be in the graph.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._before = self._state()

    def check(self) -> None:
        """Raises CaptureError if a gradient was assigned or changed since the object was made."""
        after = self._state()
        for name, state in self._before.items():
            if after[name] != state:
                raise CaptureError(WRITES_GRAD.format(name=name))

    def _state(self) -> dict[str, tuple[int, int]]:
        with warnings.catch_warnings():  # traced parameters are not leaves
            warnings.simplefilter("ignore")
            grads = {name: parameter.grad for name, parameter in self._parameters.items()}
        return {
            name: (0, 0) if grad is None else (id(grad), version_of(grad))
            for name, grad in grads.items()
        }


def _accumulation_hook(parameter: Tensor) -> str:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "register_post_accumulate_grad_hook"
    if not (parameter.requires_grad and parameter.is_leaf):
        return ""
    if torch.nn.parameter.is_lazy(parameter):
        return ""
    with without_torch_function():
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    # The node keeps its hooks in mappings that only the garbage collector can name. Plain hooks of
    # the parameter are among them.
    plain = plain_hooks(parameter)
    hooked = any(
        isinstance(table, dict) and table and table is not plain for table in gc.get_referents(node)
    )
    return "a hook on the AccumulateGrad node" if hooked else ""
