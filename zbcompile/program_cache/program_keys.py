"""The keys by which programs are kept: all that a capture freezes into the graphs; and in words how two keys differ."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from zbcompile.model.batch import Microbatch
from zbcompile.passes.capture.attention_kernels import attention_kernels
from zbcompile.passes.capture.training_step import Kept
from zbcompile.passes.torch_private import forward_hooks


class ProgramKey(NamedTuple):
    """Of a captured step: the form of its inputs, training mode and forward hooks of each module, which parameters
    train, the modes of torch, and what is kept to be returned beside the loss."""

    signature: tuple[Any, ...]
    modules: tuple[tuple[bool, tuple[int, ...]], ...]
    trains: tuple[bool, ...]
    modes: tuple[Any, ...]
    kept: Kept


def key_of(model: nn.Module, microbatch: Microbatch, device: torch.device, kept: Kept) -> ProgramKey:
    """The key of a step of `model` at present."""
    modules = tuple((module.training, forward_hooks(module)) for module in model.modules())
    trains = tuple(parameter.requires_grad for parameter in model.parameters())
    return ProgramKey(microbatch.signature, modules, trains, torch_modes(device), kept)


def torch_modes(device: torch.device) -> tuple[Any, ...]:
    """The torch modes that capture freezes into the graphs: autocast, the kernels that attention may take, and what
    forward may ask: the default dtype, deterministic algorithms, oneDNN, the precision of products."""
    asked = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return *autocast, attention_kernels(), torch.get_default_dtype(), (*asked, torch.get_float32_matmul_precision())


def what_is_new(model: nn.Module, microbatch: Microbatch, key: ProgramKey, known: Collection[ProgramKey]) -> str:
    """In what `key` differs from the nearest of the `known` keys, for a notice."""
    near = min(known, key=lambda other: sum(a != b for a, b in zip(key, other, strict=True)), default=key)
    found = [] if key.signature == near.signature else [f"microbatches of {microbatch.summary()}"]
    found += _of_modules(model, key, near)
    if key.trains != near.trains:
        names = [name for name, _ in model.named_parameters()]
        other = [i for i, (now, before) in enumerate(zip(key.trains, near.trains, strict=False)) if now != before]
        found += [f"{names[i]}{_more(len(other))} {'train' if key.trains[i] else 'frozen'}" for i in other[:1]]
    if key.modes != near.modes:
        on, dtype, kernels, default, asked = key.modes
        was_on, was_dtype, was_kernels, was_default, before = near.modes
        if on != was_on or (on and dtype != was_dtype):
            found.append(f"autocast to {str(dtype).removeprefix('torch.')}" if on else "no autocast")
        found += ["other attention kernels"] * (kernels != was_kernels)
        found += [f"the default dtype {str(default).removeprefix('torch.')}"] * (default != was_default)
        found += ["other modes of torch (deterministic algorithms, oneDNN, precision of products)"] * (asked != before)
    if key.kept != near.kept:
        found.append(f"return_{key.kept}=True" if key.kept else f"no {near.kept}")
    return " and ".join(found) or f"microbatches of {microbatch.summary()}"


def _of_modules(model: nn.Module, key: ProgramKey, near: ProgramKey) -> list[str]:
    changed = [(i, now, was) for i, (now, was) in enumerate(zip(key.modules, near.modules, strict=False)) if now != was]
    modes = [i for i, now, was in changed if now[0] != was[0]]
    hooks = [i for i, now, was in changed if now[1] != was[1]]
    names = [name or "the model" for name, _ in model.named_modules()]
    mode = [f"{names[i]}{_more(len(modes))} in {'train' if key.modules[i][0] else 'eval'} mode" for i in modes[:1]]
    return mode + [f"other forward hooks of {names[i]}{_more(len(hooks))}" for i in hooks[:1]]


def _more(count: int) -> str:
    return f" and {count - 1} more" * (count > 1)
