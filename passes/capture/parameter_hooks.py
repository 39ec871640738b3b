"""Hooks on parameters: plain hooks become part of the step, other kinds are refused.

torch.export replaces the parameters, so hooks that the user registered on them
would be lost without a word.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from zbcompile.passes.torch_private import version_of
from zbcompile.passes.torch_private_hooks import (
    accumulators,
    hook_tables,
    plain_hooks,
    tensor_hooks,
)


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
        plain = plain_hooks(parameter)  # are among the hooks of its node
        if "post_accumulate_grad_hooks" in tensor_hooks(parameter):
            yield name, "register_post_accumulate_grad_hook"
        elif any(table is not plain for table in hook_tables(accumulators([parameter]))):
            yield name, "a hook on the AccumulateGrad node"


def grad_versions(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Returns which tensor the `.grad` of each parameter is, and how often it was written."""
    with warnings.catch_warnings():  # traced parameters are not leaves
        warnings.simplefilter("ignore")
        grads = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        name: (0, 0) if grad is None else (id(grad), version_of(grad))
        for name, grad in grads.items()
    }
