"""What would be lost in silence is refused before anything is traced."""

import inspect
from typing import Any

import torch
from torch import nn

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import global_hooks, is_compiled, module_hooks, storage_key, tensor_hooks


def refuse_unsupported(model: nn.Module) -> None:
    """Raise CaptureError when `model` has something that a captured graph would drop without a word."""
    refuse_hooks(model)
    for name, module in model.named_modules():
        _refuse_compiled(name, module)
        _refuse_sparse_embedding(name, module)
    _refuse_shared_storage(model)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError for a hook on a module or parameter; cheap enough to ask before every step."""
    if global_hooks():
        raise CaptureError(
            f"{', '.join(global_hooks())} for all modules are registered; a compiled stage never calls a module, so "
            "they would be lost in silence. Remove them before step()."
        )
    for name, module in model.named_modules():
        _refuse_module_hooks(name, module)
    for name, parameter in model.named_parameters():
        _refuse_tensor_hooks(name, parameter)


def refuse_trained_loss(loss: Any) -> None:
    """Raise CaptureError for a loss with parameters of its own: torch.export makes them constants, without a word."""
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise CaptureError(
            f"the loss module {type(loss).__name__} has parameters of its own; they would belong to no stage. Move "
            "it into the model and return the loss from forward."
        )
    if not inspect.isfunction(loss):
        return
    seen = inspect.getclosurevars(loss)
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        tensors = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            raise CaptureError(
                f"the loss function {loss.__name__} reads {name}, which requires a gradient but is no parameter of the "
                "model; its gradient would be lost. Move it into the model and return the loss from forward."
            )


def _where(name: str, module: nn.Module) -> str:
    return f"module {name or '(the model itself)'} ({type(module).__name__})"


def _refuse_compiled(name: str, module: nn.Module) -> None:
    if is_compiled(module):
        raise CaptureError(
            f"{_where(name, module)} was already wrapped by torch.compile; zbcompile traces the plain module. Pass "
            "the module as it was before torch.compile (model._orig_mod)."
        )


def _refuse_module_hooks(name: str, module: nn.Module) -> None:
    hooks = module_hooks(module)
    if hooks:
        raise CaptureError(
            f"{_where(name, module)} has {', '.join(hooks)}; a compiled stage never calls the module, so a hook "
            "would be lost in silence. Remove the hook before compiling, or move what it does into forward."
        )


def _refuse_tensor_hooks(name: str, tensor: torch.Tensor) -> None:
    hooks = tensor_hooks(tensor)
    if hooks:
        raise CaptureError(
            f"parameter {name} has {', '.join(hooks)}; gradients of a compiled stage do not pass through autograd, "
            "so the hook would never fire. Remove it before compiling and work on .grad after step() instead."
        )


def _refuse_sparse_embedding(name: str, module: nn.Module) -> None:
    if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise CaptureError(
            f"{_where(name, module)} has sparse=True; zbcompile accumulates dense gradients only. Build it with "
            "sparse=False."
        )


def _refuse_shared_storage(model: nn.Module) -> None:
    """Two Parameter objects over one storage: eager updates it twice, ranks apart would silently diverge."""
    owners: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or parameter.device.type == "meta":
            continue
        first = owners.setdefault(storage_key(parameter), (name, parameter))
        if first[1] is not parameter:
            raise CaptureError(
                f"parameters {first[0]} and {name} are different Parameter objects over the same memory; on "
                "different ranks they would drift apart. Tie them by assigning one Parameter to both, or clone one "
                "of them."
            )
