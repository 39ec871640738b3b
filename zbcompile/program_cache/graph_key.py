"""The key of a compiled program: what a capture freezes into its graphs.

An export depends on shapes and modes (the key) and on the state of modules and loss
(`ModuleState`). All ranks of a pipeline have the whole batch, and so the same key.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.engine.gradients import grad_dtype
from zbcompile.passes.torch_private import attention_priority, hooks_of


class TorchModes(NamedTuple):
    """The modes of torch that capture freezes into the graphs, and those that forward may read."""

    autocast: torch.dtype | None
    attention_kernels: tuple[Any, ...]
    default_dtype: torch.dtype
    other_modes: tuple[Any, ...]


def torch_modes(device: torch.device) -> TorchModes:
    """Returns the present modes of torch for a device."""
    cuda, autocast = torch.backends.cuda, torch.is_autocast_enabled(device.type)
    kernels = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        attention_priority(),
    )
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )
    dtype = torch.get_autocast_dtype(device.type) if autocast else None
    return TorchModes(dtype, kernels, torch.get_default_dtype(), modes)


class GraphKey(NamedTuple):
    """The values for which the graphs of a step are specialised.

    `inputs` is the form of a microbatch, `model` what a step assumes about the module
    (`ModelBinding.checked_state`), `returns` what a step returns besides its loss.
    """

    inputs: tuple[Any, ...]
    model: tuple[Any, ...]
    modes: TorchModes
    returns: str


class KeyDetails(NamedTuple):
    """The values behind a key, for a notice that says how two keys differ.

    `modules` are the training mode and hooks of each module, `trains` the dtype of each parameter's
    gradient (None: frozen).
    """

    inputs: tuple[Any, ...]
    modules: tuple[tuple[bool, tuple[int, ...]], ...]
    trains: tuple[torch.dtype | None, ...]
    modes: TorchModes
    returns: str


def key_details(
    model: nn.Module, microbatch: Microbatch, modes: TorchModes, returns: str
) -> KeyDetails:
    """Returns the values behind the key of a step of `model`."""
    modules = tuple((module.training, hooks_of(module)) for module in model.modules())
    trains = tuple(grad_dtype(p) if p.requires_grad else None for p in model.parameters())
    return KeyDetails(microbatch.signature, modules, trains, modes, returns)


def recompile_reason(
    model: nn.Module, microbatch: Microbatch, new: KeyDetails, cached: Collection[KeyDetails]
) -> str:
    """Returns how a key differs from the nearest of the cached keys, for a notice; "" if it is in
    what the module state says."""
    shapes = f"microbatches of {microbatch.summary()}"
    if not cached:
        return shapes
    near = min(cached, key=lambda old: sum(a != b for a, b in zip(new, old, strict=True)))
    reasons = [] if new.inputs == near.inputs else [shapes]
    reasons += _module_reasons(model, new, near)
    if new.trains != near.trains:
        names = [name for name, _ in model.named_parameters()]
        pairs = enumerate(zip(new.trains, near.trains, strict=False))
        changed = [i for i, (now, before) in pairs if now != before]
        for i in changed[:1]:
            dtype = str(new.trains[i]).removeprefix("torch.")
            text = "frozen" if new.trains[i] is None else f"train with gradients in {dtype}"
            reasons.append(f"{names[i]}{_more(changed)} {text}")
    if new.modes.autocast != near.modes.autocast:
        dtype = str(new.modes.autocast).removeprefix("torch.")
        reasons.append(f"autocast to {dtype}" if new.modes.autocast else "no autocast")
    if new.modes.attention_kernels != near.modes.attention_kernels:
        reasons.append("other attention kernels")
    if new.modes.default_dtype != near.modes.default_dtype:
        reasons.append(f"the default dtype {str(new.modes.default_dtype).removeprefix('torch.')}")
    if new.modes.other_modes != near.modes.other_modes:
        reasons.append(
            "other modes of torch (deterministic algorithms, oneDNN, precision of products)"
        )
    if new.returns != near.returns:
        reasons.append(f"return_{new.returns}=True" if new.returns else f"no {near.returns}")
    return " and ".join(reasons)


def _module_reasons(model: nn.Module, new: KeyDetails, near: KeyDetails) -> list[str]:
    if len(new.modules) != len(near.modules):
        return [f"{len(new.modules)} modules instead of {len(near.modules)}"]
    names = [name or "the model" for name, _ in model.named_modules()]
    pairs = list(enumerate(zip(new.modules, near.modules, strict=False)))
    modes = [i for i, (now, before) in pairs if now[0] != before[0]]
    hooks = [i for i, (now, before) in pairs if now[1] != before[1]]
    reasons = []
    for i in modes[:1]:
        mode = "train" if new.modules[i][0] else "eval"
        reasons.append(f"{names[i]}{_more(modes)} in {mode} mode")
    return reasons + [f"other hooks of {names[i]}{_more(hooks)}" for i in hooks[:1]]


def _more(changed: Collection[int]) -> str:
    return f" and {len(changed) - 1} more" if len(changed) > 1 else ""
