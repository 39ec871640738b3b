"""The memory layout of some operators' results, which torch gets wrong for tensors without memory.

torch 2.11-2.13 infers their results from formulas of its own, whose strides follow another operand than the kernel's,
or follow one if the kernel's result is contiguous. A graph traced so views what cannot be viewed, or runs other kernels
than eager does. The lists are all that differed among the pointwise operators, the operators of one tensor and the
backwards of torch 2.13, each with transposed, sliced and expanded operands.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from zbcompile.passes.torch_private import LOG_SOFTMAX_BACKWARD, FakeTensorMode, replaced

aten = torch.ops.aten

# As a sum of the first two operands has it.
ELEMENTWISE = frozenset(
    {
        *(aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default, aten.native_dropout_backward.default),
        *(aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default),
        *(aten.hardtanh_backward.default, aten.logit_backward.default, aten.softplus_backward.default),
    }
)
LIKE_SECOND = frozenset({aten.binary_cross_entropy_backward.default})
CONTIGUOUS = frozenset(
    {
        *(aten.pow.Scalar, aten.isin.Tensor_Scalar, aten.log_sigmoid_forward.default),
        *(aten.normal.float_Tensor, aten.poisson.default),
        aten.rrelu_with_noise.default,
        *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
        LOG_SOFTMAX_BACKWARD,
    }
)


@contextlib.contextmanager
def kernels_layouts() -> Iterator[None]:
    """Inside, fake tensors have the strides that the operators' kernels give them."""
    inferred = FakeTensorMode.dispatch

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = inferred(mode, func, types, args, kwargs)
        if func in ELEMENTWISE or func in LIKE_SECOND:
            with mode:
                like = torch.add(args[0], args[1]) if func in ELEMENTWISE else args[1]
                return torch.empty_like(like, dtype=made.dtype)
        return _contiguous(mode, made) if func in CONTIGUOUS else made

    with replaced(FakeTensorMode, "dispatch", dispatch):
        yield


def _contiguous(mode: FakeTensorMode, made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(_contiguous(mode, each) for each in made)
    with mode:
        return torch.empty(made.shape, dtype=made.dtype, device=made.device)
