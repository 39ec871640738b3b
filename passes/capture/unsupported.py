"""Refuse, before anything is traced, what a trace would silently lose.

Each rule yields a sentence for every violation, so that `zbcompile.explain` can show all of them.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_private import (
    accumulation_hooks,
    backward_hooks,
    forward_hook_functions,
    global_hooks,
    is_compiled,
    storage_key,
    tensor_hooks,
)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
REPLICAS = 'Replicas are the dimension "dp" of mesh=, and pipe.optimizer(zero=1) divides the optimizer among them.'
WRAPPERS = {  # by the name of the class, so that nothing is imported for it: what to do instead
    "DataParallel": f"Pass model.module. {REPLICAS}",
    "DistributedDataParallel": f"Pass model.module. {REPLICAS}",
    "DDP": f"Pass the module as it was before replicate(). {REPLICAS}",
    "ReplicateModule": f"Pass the module as it was before replicate(). {REPLICAS}",
    "FullyShardedDataParallel": f"Pass the module as it was before. {REPLICAS}",
    "FSDPModule": f"Pass the module as it was before fully_shard. {REPLICAS}",
    "ScriptModule": "Pass the module that was scripted: there is no Python code to trace in this one.",
}


def raise_first(problems: Iterable[str]) -> None:
    """Raise CaptureError with the first problem and the number of further ones; do nothing if there is none."""
    found = list(dict.fromkeys(problems))
    if found:
        more = f" ({len(found) - 1} more: zbcompile.explain lists them.)" if found[1:] else ""
        raise CaptureError(found[0] + more)


def training_problems(model: nn.Module, loss: Any) -> Iterator[str]:
    """The reasons why `model` cannot be trained with `loss`."""
    yield from problems_of(model)
    yield from _trained_loss(loss, {id(parameter) for parameter in model.parameters()})
    for name, module in model.named_modules():
        averages = isinstance(module, BATCH_NORMS) and module.training and module.running_mean is not None
        if averages and module.momentum is None:
            yield (
                f"{_where(name, module)} has momentum=None: it divides by the number of batches so far, which it reads "
                "out of a tensor in every forward. Give it a momentum, such as 0.1."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield f"no parameter of {type(model).__name__} requires a gradient; there is nothing to train."


def wrapper_problems(model: nn.Module) -> Iterator[str]:
    """Modules that do more than their forward says, or have none that can be traced."""
    for name, module in model.named_modules():
        classes = [cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.")]
        if wrapper := next((cls.__name__ for cls in classes if cls.__name__ in WRAPPERS), None):
            yield f"{_where(name, module)} is a {wrapper}, which cannot be captured. {WRAPPERS[wrapper]}"


def problems_of(model: nn.Module) -> Iterator[str]:
    """What a captured graph of `model` would silently drop."""
    yield from wrapper_problems(model)
    if str(nn.functional.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        yield (
            "inside torch's context_parallel(), attention takes DTensors and the batch is cut in place. Compile and "
            'step outside of it, with "cp" in mesh= and the exchange of keys and values written in the model '
            "(functional collectives)."
        )
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            yield (
                f"{_where(name, module)} is lazy and has no shapes yet. Call the model once with a batch before "
                "compiling, or give the layer its sizes."
            )
    yield from hook_problems(model)
    for name, module in model.named_modules():
        yield from (f"{_where(name, module)} {says}" for says in _replaced_weights(module))
        if is_compiled(module):
            yield (
                f"{_where(name, module)} was already wrapped by torch.compile; zbcompile traces the plain module. Pass "
                "the module as it was before torch.compile (model._orig_mod)."
            )
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield (
                f"{_where(name, module)} has sparse=True; zbcompile accumulates dense gradients only. Build it with "
                "sparse=False."
            )
    yield from _shared_storage(model)


def _replaced_weights(module: nn.Module) -> Iterator[str]:
    """Hooks of torch that replace a weight before every forward, by a plain tensor that no stage could own."""
    for hook in forward_hook_functions(module):
        kind = type(hook)
        if kind.__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"):
            name = kind.__module__.rpartition(".")[2]
            yield (
                f"has torch.nn.utils.{name}, whose hook replaces {hook.name} before every forward. Use "  # type: ignore[attr-defined]
                f"torch.nn.utils.parametrizations.{name}, which computes the same."
            )
        elif any(base.__name__ == "BasePruningMethod" for base in kind.__mro__):
            yield (
                "is pruned: a hook replaces a parameter before every forward. Call "
                "torch.nn.utils.prune.remove to keep the pruned values, or torch.nn.utils.parametrize."
                "register_parametrization with a module that multiplies by the mask, to train under it."
            )


def hook_problems(model: nn.Module) -> Iterator[str]:
    """Hooks that a compiled stage would lose; cheap enough to check before every step. Forward hooks of a module run in
    its forward and are captured with it."""
    if global_hooks():
        yield (
            f"{', '.join(global_hooks())} for all modules are registered; a compiled stage never calls a module, so "
            "they would be silently lost. Register forward hooks on the modules themselves, and remove these."
        )
    for name, module in model.named_modules():
        if hooks := backward_hooks(module):
            yield (
                f"{_where(name, module)} has {', '.join(hooks)}; gradients of a compiled stage do not pass through "
                "autograd, so a hook would be silently lost. Remove the hook before compiling, or write it as "
                "a torch.library.custom_op with register_autograd."
            )
    for name, parameter in model.named_parameters():
        if hooks := tensor_hooks(parameter) or accumulation_hooks(parameter):
            yield (
                f"parameter {name} has {', '.join(hooks)}; gradients of a compiled stage do not pass through autograd, "
                "so the hook would never fire. Remove it before compiling and work on .grad after step() instead."
            )


def _trained_loss(loss: Any, own: Collection[int]) -> Iterator[str]:
    """A loss function that reads a tensor that requires a gradient: torch.export silently makes a constant of it."""
    if not inspect.isfunction(loss):
        return
    seen = inspect.getclosurevars(loss)
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        tensors = value.parameters() if isinstance(value, nn.Module) else [value]
        trained = [each for each in tensors if isinstance(each, torch.Tensor) and each.requires_grad]
        if any(id(each) not in own for each in trained):
            yield (
                f"the loss function {loss.__name__} reads {name}, which requires a gradient but is not a parameter of "
                "the model; its gradient would be lost. Move it into the model and return the loss from forward."
            )


def _where(name: str, module: nn.Module) -> str:
    return f"module {name or '(the model itself)'} ({type(module).__name__})"


def _shared_storage(model: nn.Module) -> Iterator[str]:
    """Two Parameter objects that alias one storage: eager updates it twice, on separate ranks they silently diverge."""
    reaches: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter) or not parameter.numel() or parameter.is_meta:
            continue
        start, end = _extent(parameter)
        near = reaches.setdefault(storage_key(parameter), [])
        for other in (other for first, last, other in near if first < end and start < last):
            yield (
                f"parameters {other} and {name} are different Parameter objects over the same memory; on "
                "different ranks they would drift apart. Tie them by assigning one Parameter to both, or clone one "
                "of them."
            )
        near.append((start, end, name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range of its storage that a tensor occupies: parts of one flat buffer (cuDNN's) do not overlap."""
    last = sum((size - 1) * stride for size, stride in zip(map(int, tensor.shape), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize
