"""`torch.nn.attention.sdpa_kernel` inside a model: the attention of the region runs the kernel that eager runs.

A graph has no such regions: torch chooses a kernel when it traces the operator's parts, by the switches of that time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbcompile.passes.gpu import kind_of
from zbcompile.passes.torch_private import ATTENTION_BY_FORMULA, attention_priority

Kernels = tuple[frozenset[str], tuple[int, ...]]
_ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
_OF_CPU = frozenset({"flash", "math"})


def attention_kernels() -> Kernels:
    """The kernels that attention may take at present, and the order in which they are tried."""
    return frozenset(name for name, enabled in _ENABLED.items() if enabled()), attention_priority()


def calls_attention(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call that a model makes comes down to scaled_dot_product_attention."""
    whole = function is F.multi_head_attention_forward and not kwargs.get("need_weights", True)
    return function is F.scaled_dot_product_attention or whole


def is_by_formula(function: Any, now: Kernels, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of attention can only be computed by its formula (torch's math kernel): `now` leaves no other, or,
    on a CPU, the mask is trained (relative positions), which a trace below autograd cannot see."""
    if function is not F.scaled_dot_product_attention:
        return False
    given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
    query, mask = given["query"], given.get("attn_mask")
    trained = mask is not None and mask.requires_grad and kind_of(query.device) == "cpu"
    return trained or _usable(now, query.device)[0] == {"math"}


def is_same_choice(before: Kernels, now: Kernels, device: torch.device) -> bool:
    """Whether attention on `device` takes the same kernel under `before` and `now`, if it takes any. A CPU has one
    kernel besides the formula, which is chosen last."""
    one, other = _usable(before, device), _usable(now, device)
    return one == other or (kind_of(device) == "cpu" and "flash" in one[0] & other[0])


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *given: Any, **rest: Any
) -> Any:
    """Attention as torch's formula computes it, whatever the switches say later."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # torch does it before it chooses a kernel
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
    return ATTENTION_BY_FORMULA(query, key, value, attn_mask, *given, **rest)[0]


def _usable(kernels: Kernels, device: torch.device) -> Kernels:
    names, priority = kernels
    return (names & _OF_CPU, ()) if kind_of(device) == "cpu" else (names, priority)
