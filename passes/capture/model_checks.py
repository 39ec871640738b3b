"""Checks of a model before it is traced."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from torch import nn

from zbcompile.passes.capture.parameter_hooks import accumulation_hooks
from zbcompile.passes.capture.unsupported import (
    FUNCTION_MODE_IS_ON,
    HAS_GLOBAL_HOOKS,
    HOOK_NEVER_RUNS,
    INSIDE_CONTEXT_PARALLEL,
    IS_A_WRAPPER,
    IS_LAZY,
    SHARES_MEMORY,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.source_location import is_users_name
from zbcompile.passes.graph.storage import byte_range
from zbcompile.passes.torch_private import storage_key
from zbcompile.passes.torch_private_hooks import function_modes, global_hooks

_REPLICAS = (
    'Replicas are the dimension "dp" of mesh=, and pipe.optimizer(zero=1) shards the optimizer.'
)
_WRAPPERS = {  # by the name of the class, so that nothing is imported: the remedy
    "DataParallel": f"Pass model.module. {_REPLICAS}",
    "DistributedDataParallel": f"Pass model.module. {_REPLICAS}",
    "DDP": f"Pass the module as it was before replicate(). {_REPLICAS}",
    "ReplicateModule": f"Pass the module as it was before replicate(). {_REPLICAS}",
    "FullyShardedDataParallel": f"Pass the module as it was before. {_REPLICAS}",
    "FSDPModule": f"Pass the module as it was before fully_shard. {_REPLICAS}",
    "ScriptModule": "Pass the module that was scripted: this one has no Python code to trace.",
}


def refuse(problems: Iterable[str]) -> None:
    """Raises CaptureError with the first problem of a model."""
    for problem in problems:
        raise CaptureError(problem)


def model_problems(model: nn.Module) -> Iterator[str]:
    """Yields a sentence for every reason why a model cannot be captured."""
    if str(nn.functional.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        yield INSIDE_CONTEXT_PARALLEL
    yield from wrappers(model)
    yield from lost_hooks(model)
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            yield IS_LAZY.format(module=_described(name, module))
    yield from _shared_memory(model)


def _described(name: str, module: nn.Module) -> str:
    return f"module {name or '(the model itself)'} ({type(module).__name__})"


def wrappers(model: nn.Module) -> Iterator[str]:
    """Yields a sentence for every wrapper that does more than its forward says."""
    for name, module in model.named_modules():
        classes = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        wrapper = next((kind.__name__ for kind in classes if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            names = {"kind": wrapper, "remedy": _WRAPPERS[wrapper]}
            yield IS_A_WRAPPER.format(module=_described(name, module), **names)


def lost_hooks(model: nn.Module) -> Iterator[str]:
    """Yields a sentence for hooks and modes that a compiled step would lose, cheap enough for every
    step. Hooks on modules and plain hooks on parameters are a part of the step."""
    if global_hooks():
        yield HAS_GLOBAL_HOOKS.format(hooks=", ".join(global_hooks()))
    for mode in function_modes():
        if is_users_name(mode.__module__):
            yield FUNCTION_MODE_IS_ON.format(mode=mode.__name__)
    for name, kind in accumulation_hooks(model):
        yield HOOK_NEVER_RUNS.format(kind=kind, name=name)


def _shared_memory(model: nn.Module) -> Iterator[str]:
    """Yields a sentence for parameters, or buffers, that are different tensors over one memory.

    Stages on different ranks would change only their own.
    """
    for kind, named in (
        ("parameters", model.named_parameters()),
        ("buffers", model.named_buffers()),
    ):
        ranges = [
            (storage_key(tensor), *byte_range(tensor), name)
            for name, tensor in named
            if not nn.parameter.is_lazy(tensor) and tensor.numel() and not tensor.is_meta
        ]
        ranges.sort(key=lambda entry: entry[:2])
        for (key, _, end, first), (following, start, _, second) in pairwise(ranges):
            if key == following and start < end:  # the parts of a flat buffer are disjoint
                yield SHARES_MEMORY.format(kind=kind, first=first, second=second)
