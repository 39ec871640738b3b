"""The key of a compiled program: what a capture freezes into its graphs.

An export depends on shapes and modes (the key) and on the state of modules and loss
(`ModuleState`). All ranks of a pipeline have the whole batch, and so the same key.
"""

from collections.abc import Callable, Collection
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


# The values behind a key by what they say and of what: ("mode", "layers.0") -> "train".
KeyDetails = dict[tuple[str, str], Any]


def key_details(
    model: nn.Module, microbatch: Microbatch, modes: TorchModes, returns: str
) -> KeyDetails:
    """Returns the values behind the key of a step of `model`, for a notice that says how two keys
    differ."""
    details: KeyDetails = {("inputs", ""): microbatch.signature, ("returns", ""): returns}
    for name, module in model.named_modules():
        details["mode", name or "the model"] = "train" if module.training else "eval"
        details["hooks", name or "the model"] = hooks_of(module)
    for name, parameter in model.named_parameters():
        details["gradient", name] = grad_dtype(parameter) if parameter.requires_grad else None
    return details | {(field, ""): value for field, value in modes._asdict().items()}


def recompile_reason(
    microbatch: Microbatch, new: KeyDetails, cached: Collection[KeyDetails]
) -> str:
    """Returns how a key differs from the nearest of the cached keys, for a notice; "" if it is in
    what the module state says."""
    shapes = f"microbatches of {microbatch.summary()}"
    if not cached:
        return shapes
    near = min(cached, key=lambda old: len(new.items() ^ old.items()))
    reasons = []
    for kind in dict.fromkeys(kind for kind, _ in new):
        names = [n for k, n in new if k == kind and new[k, n] != near.get((k, n))]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = _KINDS[kind](new[kind, names[0]])
            reasons.append(text.format(name=names[0] + more, shapes=shapes))
    return " and ".join(reasons)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_KINDS: dict[str, Callable[[Any], str]] = {
    "inputs": lambda value: "{shapes}",
    "returns": lambda value: f"return_{value}=True" if value else "no returned values",
    "mode": lambda value: f"{{name}} in {value} mode",
    "hooks": lambda value: "other hooks of {name}",
    "gradient": lambda value: (
        "{name} frozen" if value is None else f"{{name}} train with gradients in {_name(value)}"
    ),
    "autocast": lambda value: f"autocast to {_name(value)}" if value else "no autocast",
    "attention_kernels": lambda value: "other attention kernels",
    "default_dtype": lambda value: f"the default dtype {_name(value)}",
    "other_modes": lambda value: (
        "other modes of torch (deterministic algorithms, oneDNN, precision of products)"
    ),
}
