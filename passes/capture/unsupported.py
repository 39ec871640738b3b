"""Refuse, before anything is traced, what a trace would silently lose.

Each rule yields a sentence for every violation, so that `zbcompile.explain` can show all of them.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.source_location import is_users
from zbcompile.passes.torch_private import (
    accumulation_hooks,
    backward_hooks,
    forward_hook_functions,
    function_modes,
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
            yield Refusal.MOMENTUM.text(module=_where(name, module))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield Refusal.NOTHING_TRAINS.text(model=type(model).__name__)


def wrapper_problems(model: nn.Module) -> Iterator[str]:
    """Modules that do more than their forward says, or whose forward cannot be traced."""
    for name, module in model.named_modules():
        classes = [cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.")]
        if wrapper := next((cls.__name__ for cls in classes if cls.__name__ in WRAPPERS), None):
            yield Refusal.WRAPPER.text(module=_where(name, module), wrapper=wrapper, instead=WRAPPERS[wrapper])


def problems_of(model: nn.Module) -> Iterator[str]:
    """What a captured graph of `model` would silently drop."""
    yield from wrapper_problems(model)
    if str(nn.functional.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        yield Refusal.CONTEXT_PARALLEL.text()
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            yield Refusal.LAZY.text(module=_where(name, module))
    yield from hook_problems(model)
    for name, module in model.named_modules():
        yield from _replaced_weights(name, module)
        if is_compiled(module):
            yield Refusal.COMPILED.text(module=_where(name, module))
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield Refusal.SPARSE_MODULE.text(module=_where(name, module))
    yield from _shared_storage(model)


def _replaced_weights(path: str, module: nn.Module) -> Iterator[str]:
    """Hooks of torch that replace a weight before every forward, by a plain tensor that no stage could own."""
    for hook in forward_hook_functions(module):
        kind = type(hook)
        if kind.__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"):
            names = {"function": kind.__module__.rpartition(".")[2], "parameter": hook.name}  # type: ignore[attr-defined]
            yield Refusal.REPLACED_WEIGHT.text(module=_where(path, module), **names)
        elif any(base.__name__ == "BasePruningMethod" for base in kind.__mro__):
            yield Refusal.PRUNED.text(module=_where(path, module))


def hook_problems(model: nn.Module) -> Iterator[str]:
    """Hooks that a compiled stage would lose; cheap enough to check before every step. Forward hooks of a module run in
    its forward and are captured with it."""
    if global_hooks():
        yield Refusal.GLOBAL_HOOKS.text(hooks=", ".join(global_hooks()))
    for mode in filter(is_users, function_modes()):
        yield Refusal.FUNCTION_MODE.text(mode=mode.__name__)
    for name, module in model.named_modules():
        if hooks := backward_hooks(module):
            yield Refusal.MODULE_HOOKS.text(module=_where(name, module), hooks=", ".join(hooks))
    for name, parameter in model.named_parameters():
        if hooks := tensor_hooks(parameter) or accumulation_hooks(parameter):
            yield Refusal.PARAMETER_HOOKS.text(name=name, hooks=", ".join(hooks))


def _trained_loss(loss: Any, own: Collection[int]) -> Iterator[str]:
    """A loss function that reads a tensor that requires a gradient: torch.export silently makes a constant of it."""
    if not inspect.isfunction(loss):
        return
    seen = inspect.getclosurevars(loss)
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        tensors = value.parameters() if isinstance(value, nn.Module) else [value]
        trained = [each for each in tensors if isinstance(each, torch.Tensor) and each.requires_grad]
        if any(id(each) not in own for each in trained):
            yield Refusal.TRAINED_LOSS.text(loss=loss.__name__, name=name)


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
            yield Refusal.SHARED_MEMORY.text(one=other, other=name)
        near.append((start, end, name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range of its storage that a tensor occupies: parts of one flat buffer (cuDNN's) do not overlap."""
    last = sum((size - 1) * stride for size, stride in zip(map(int, tensor.shape), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize
