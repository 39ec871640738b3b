"""Hooks and function modes: where torch keeps them, under private names."""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.torch_private import without_torch_function

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FORWARD_HOOK_OPTIONS = (
    *(f"{kind}_with_kwargs" for kind in _FORWARD_HOOKS),
    "_forward_hooks_always_called",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Returns the numbers of the hooks of `module` and of its parameters. No two hooks have one
    number."""
    numbers = [
        number
        for kind in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
        for number in getattr(module, kind, ())
    ]
    with without_torch_function():
        for tensor in module._parameters.values():
            if tensor is not None and tensor._backward_hooks:
                numbers += tensor._backward_hooks
    return tuple(numbers)


def forward_hook_tables(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Returns the tables of the hooks of `module` and of the way in which hooks are called."""
    kinds = (*_FORWARD_HOOKS, *_FORWARD_HOOK_OPTIONS, *_BACKWARD_HOOKS)
    return [getattr(module, kind) for kind in kinds]


def global_hooks() -> list[str]:
    """Returns the kinds of hooks that are registered for all modules."""
    kinds = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
    tables = vars(torch.nn.modules.module)
    return [kind.strip("_") for kind in kinds if tables.get(f"_global{kind}")]


def function_modes() -> tuple[type, ...]:
    """Returns the classes of the torch function modes that are on."""
    return tuple(map(type, torch.overrides._get_current_function_mode_stack()))


def tensor_hooks(tensor: Tensor) -> list[str]:
    """Returns the kinds of hooks that are registered on `tensor`."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [kind.strip("_") for kind in kinds if getattr(tensor, kind, None)]


def accumulators(tensors: Iterable[Tensor]) -> list[Any]:
    """Returns the AccumulateGrad nodes of trained leaves. Hooks on a node last as long as it."""
    leaves = (
        tensor
        for tensor in tensors
        if tensor.requires_grad and tensor.is_leaf and not torch.nn.parameter.is_lazy(tensor)
    )
    with without_torch_function():  # their values are not read
        return [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]


def hook_tables(nodes: Sequence[Any]) -> list[dict[Any, Any]]:
    """Returns the tables of hooks of AccumulateGrad nodes that are not empty.

    Only the garbage collector can name them.
    """
    return [table for table in gc.get_referents(*nodes) if isinstance(table, dict) and table]


def plain_hooks(tensor: Tensor) -> Any:
    """Returns the hooks that `register_hook` added, by number; None if there are none."""
    return tensor._backward_hooks
