"""The kernels that an accelerator runs, for graphs made where there is none.

Composite operations become kernels while a model is captured (dropout) or when their derivative is
traced (attention), and torch chooses these by the device, which it asks. For `gpu.ABSENT` they are
chosen here, as torch 2.11-2.15 does for CUDA: dropout in one kernel that keeps its mask, attention
by flash if dtype, width and mask allow it, else by the memory-efficient kernel, else by its
formula.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from zbcompile.passes.gpu import ABSENT
from zbcompile.passes.torch_private import EFFICIENT_ATTENTION, FLASH_ATTENTION, MATH_ATTENTION

aten = torch.ops.aten
WIDEST, ALIGNED = 256, 8  # heads of flash attention: at most so wide, in multiples of this


def kernel_of(target: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The kernel that runs in place of an operation or of a function of torch. It differs from the
    operation only if its first operand is on a device that this machine does not have."""
    if (
        target in _KERNELS
        and args
        and isinstance(args[0], torch.Tensor)
        and args[0].device == ABSENT
    ):
        return _KERNELS[target]
    return target  # type: ignore[no-any-return]


def _dropout(
    value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(value, p, training, inplace)
    return torch.native_dropout(value, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    given = query, key, value
    fits = (
        query.dim() == 4
        and len({t.shape[-1] for t in given}) == 1
        and query.shape[-1] % ALIGNED == 0
    )
    result: torch.Tensor
    if fits and attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= WIDEST:
        result = FLASH_ATTENTION(*given, dropout_p, is_causal, False, scale=scale)[0]
    elif fits and not enable_gqa and query.dtype is not torch.float64:
        bias = (
            None
            if attn_mask is None
            else _as_bias(attn_mask, query).expand(*query.shape[:3], key.shape[2])
        )
        gradients = any(t.requires_grad for t in given)
        result = EFFICIENT_ATTENTION(*given, bias, gradients, dropout_p, is_causal, scale=scale)[0]
    else:
        bias = None if attn_mask is None else _as_bias(attn_mask, query)
        result = MATH_ATTENTION(
            *given, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return result


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask as the bias that is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -torch.inf)


_KERNELS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
    **dict.fromkeys(
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default), _attention
    ),
}
