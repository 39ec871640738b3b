"""The private PyTorch names behind what capture changes in torch.export while it runs."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey  # 2.11-2.13: which of an operator's kernels is meant
from torch._export import utils as _export_utils  # 2.11-2.13: see `quick_decompositions`

from zbcompile.passes.torch_private import OpOverload, replaced

aten = torch.ops.aten


@functools.cache
def _rewritten() -> tuple[OpOverload, ...]:
    """The operators that torch rewrites in Python while it traces with autograd. Batch norms need it: theirs calls the
    same kernel and says what it writes, which the schema does not."""
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    needed = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
    return tuple(op for op in overloads if DispatchKey.Autograd in op.py_kernels and op not in needed)


@contextlib.contextmanager
def eagers_kernels() -> Iterator[None]:
    """Inside, make torch.export trace the operations that eager runs.

    For some operators (dropout, softshrink, upsampling) torch keeps a second implementation in Python, which tracing
    alone uses (2.11-2.13: `OpOverload.py_impl`). It is mathematically equal but not bit for bit: the gradient of a
    dropout, for one, is scaled by another rounding of 1 / (1 - p).
    """
    kept = [(operator, dict(operator.py_kernels)) for operator in _rewritten()]
    try:
        for operator, _ in kept:
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in kept:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


class _Unevaluated:
    """Placeholder for `Callable` in annotations that are evaluated over and over."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


@contextlib.contextmanager
def quick_decompositions() -> Iterator[None]:
    """Around `run_decompositions`, without torch 2.11-2.13's repeated work: it lists the composite operators
    once per operator library, and evaluates the annotations of `py_impl` eleven thousand times. This is half the
    time of capturing a small model."""
    list_operators = functools.cache(_export_utils._materialize_cpp_cia_ops)
    with (
        replaced(_export_utils, "_materialize_cpp_cia_ops", list_operators),
        replaced(torch._ops, "Callable", _Unevaluated),
    ):
        yield
