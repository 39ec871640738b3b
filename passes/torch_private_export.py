"""torch.export below autograd, with the private names of torch that it needs.

A trace contains the operations that eager mode runs, on tensors with the strides of eager mode.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls
from torch.export import ExportedProgram
from torch.export._trace import _export  # torch.export.export keeps composite operations whole
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from zbcompile.passes.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    compiling,
    pytree,
    replaced,
)

aten = torch.ops.aten


def export_below_autograd(
    module: torch.nn.Module, example: tuple[Any, ...], device: torch.device
) -> ExportedProgram:
    """Exports `module` as a graph of functional ATen operations, below autograd.

    Tensors on the meta device are traced as tensors on `device`. The caller's dispatch modes and
    hooks are traced as well. `torch.compile`d submodules run as the modules that they wrap.
    """
    from torch._dynamo import config as dynamo_config

    with (
        torch.autograd.set_multithreading_enabled(False),  # the tracer sees this thread alone
        fx_traceback.preserve_node_meta(),
        torch.compiler.set_stance("force_eager"),
        dynamo_config.patch(error_on_nested_fx_trace=False),  # compiled submodules are inlined
        _compiled_operators(),
        eager_kernels(),
        kernel_strides(),
        meta_tensors_on(device),
        # Checks of arguments decide by values.
        replaced(torch.distributions.Distribution, "_validate_args", False),
        _no_garbage_collection(),
        _no_stack_traces(),
        _use_lazy_graph_module(True),  # code that nobody runs is not generated
    ):
        return _export(module, example, strict=False, pre_dispatch=False)


@contextlib.contextmanager
def _compiled_operators() -> Iterator[None]:
    """Context in which torch.cond and flex_attention call torch.compile in spite of the stance
    "force_eager". They let Dynamo flatten their branches, and fail to differentiate others."""
    from torch._higher_order_ops import utils

    original = utils.setup_compilation_env

    @contextlib.contextmanager
    def environment() -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            while (  # of our function modes, which Dynamo would trace
                modes := _get_current_function_mode_stack()
            ) and type(modes[-1]).__module__.startswith("zbcompile"):
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(torch.compiler.set_stance("default"))
            stack.enter_context(compiling(True))
            yield stack.enter_context(original())

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("setup_compilation_env") is original:
                stack.enter_context(replaced(module, "setup_compilation_env", environment))
        yield


@contextlib.contextmanager
def meta_tensors_on(device: torch.device) -> Iterator[None]:
    """Context in which meta tensors become fake tensors on `device`.

    On the meta device itself neither autocast nor attention kernels can be traced.
    """
    original = FakeTensorMode.from_tensor

    def from_tensor(mode: FakeTensorMode, tensor: Tensor, **options: Any) -> FakeTensor:
        fake = original(mode, tensor, **options)
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            fake.fake_device = device
        return fake

    with replaced(FakeTensorMode, "from_tensor", from_tensor):
        yield


@functools.cache
def _operators_with_python_kernels() -> tuple[OpOverload, ...]:
    """Returns the operators that torch traces by a Python implementation of their own.

    Batch norms are left out: theirs calls the kernel and declares what the kernel writes.
    """
    packets = [getattr(aten, name) for name in dir(aten)]
    overloads = [
        getattr(packet, name)
        for packet in packets
        if hasattr(packet, "overloads")
        for name in packet.overloads()
    ]
    batch_norms = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
    return tuple(
        op for op in overloads if DispatchKey.Autograd in op.py_kernels and op not in batch_norms
    )


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Context in which a trace contains the operations that eager mode runs.

    torch keeps Python implementations of some operators (dropout, softshrink, upsampling) for
    traces. They round differently: dropout scales its gradient by another value of 1 / (1 - p).
    """
    # Unused random numbers move the generator in eager mode. Graph.eliminate_dead_code keeps them
    # if inductor is told to fall back to eager's random numbers.
    from torch._inductor import config as inductor_config

    operators = _operators_with_python_kernels()
    kernels = [dict(operator.py_kernels) for operator in operators]
    try:
        for operator in operators:
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        with inductor_config.patch(fallback_random=True):
            yield
    finally:
        for operator, removed in zip(operators, kernels, strict=True):
            operator.py_kernels.update(removed)
            operator._dispatch_cache.clear()


# Results whose strides torch's fake tensors (2.11 to 2.14) compute differently from the kernels:
# as the sum of the first two operands, as the second operand, or contiguous.
_STRIDES_OF_SUM = frozenset(
    {
        *("copysign.Tensor", "xlogy.Tensor", "special_xlog1py.default", "div.Tensor_mode"),
        *("floor_divide.default", "native_dropout_backward.default", "elu_backward.default"),
        *("hardsigmoid_backward.default", "hardswish_backward.default"),
        *("hardtanh_backward.default", "logit_backward.default", "softplus_backward.default"),
    }
)
_STRIDES_OF_SECOND = "binary_cross_entropy_backward.default"
_CONTIGUOUS = frozenset(
    {
        *("pow.Scalar", "isin.Tensor_Scalar", "log_sigmoid_forward.default"),
        *("normal.float_Tensor", "poisson.default", "rrelu_with_noise.default"),
        *("mse_loss_backward.default", "smooth_l1_loss_backward.default"),
        *("huber_loss_backward.default", "_log_softmax_backward_data.default"),
        "native_layer_norm_backward.default",
    }
)
# Kernels for the CPU whose result is contiguous or in the channels-last layout of their first
# operand, or their second.
_CHANNELS_LAST_OF_FIRST = frozenset(
    {
        *("native_batch_norm.default", "_native_batch_norm_legit.default"),
        *("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default"),
        *("_batch_norm_with_update.default", "_batch_norm_with_update_functional.default"),
        *("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default"),
    }
)
_CHANNELS_LAST_OF_SECOND = frozenset(
    {
        *("native_batch_norm_backward.default", "batch_norm_backward.default"),
        "native_group_norm_backward.default",  # torch 2.14 takes inputs with gaps
    }
)


@contextlib.contextmanager
def kernel_strides() -> Iterator[None]:
    """Context in which fake tensors have the strides that the kernels produce."""
    original = FakeTensorMode.dispatch

    def dispatch(
        mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result: Any = original(mode, func, types, args, kwargs)
        name = str(func).removeprefix("aten.")  # operators of other libraries keep their namespace
        if name in _CONTIGUOUS:
            return pytree.tree_map_only(Tensor, functools.partial(_contiguous_like, mode), result)
        if name in _CHANNELS_LAST_OF_FIRST or name in _CHANNELS_LAST_OF_SECOND:
            like = args[name in _CHANNELS_LAST_OF_SECOND]
            first, *rest = result
            if first is not None and like.device.type == "cpu":
                with mode:
                    first = torch.empty_like(first, memory_format=suggest_memory_format(like))
            return (first, *rest)
        if name in _STRIDES_OF_SUM or name == _STRIDES_OF_SECOND:
            with mode:
                like = torch.add(args[0], args[1]) if name in _STRIDES_OF_SUM else args[1]
                return torch.empty_like(like, dtype=result.dtype)
        return result

    with replaced(FakeTensorMode, "dispatch", dispatch):
        yield


def _contiguous_like(mode: FakeTensorMode, value: Tensor) -> Tensor:
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _fake_grouped_mm(mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Shape function of a grouped product in dtypes that the CPU kernel supports and torch's own
    shape function refuses."""
    first, second, offsets, *_ = (*args, *kwargs.values(), None)
    if first.device.type != "cpu" or first.dtype == torch.bfloat16:
        return NotImplemented
    sizes = [first.shape[-2], second.shape[-1]]
    if first.ndim == second.ndim:
        sizes.insert(0, first.shape[0] if first.ndim == 3 else offsets.shape[0])
    with mode:
        return torch.empty(sizes, dtype=first.dtype, device=first.device)


def _fake_ctc_loss(mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Shape function of a CTC loss. The second result, which is saved for the backward, is as long
    as the longest target; if that is not known, its shape is an upper bound."""
    log_probs, targets, _, target_lengths = args[:4]
    longest = targets.shape[-1] if isinstance(target_lengths, Tensor) else max(target_lengths)
    length, batch = log_probs.shape[:2] if log_probs.ndim == 3 else (log_probs.shape[0], 1)
    with mode:
        losses = log_probs.new_empty((batch,))
        return losses, log_probs.new_empty((batch, length, 2 * longest + 1))


def _fake_ctc_loss_backward(
    mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any
) -> Tensor:
    return _contiguous_like(mode, args[1])


for _operator, _shape_function in (
    (aten._grouped_mm.default, _fake_grouped_mm),
    (aten._ctc_loss.default, _fake_ctc_loss),
    (aten._ctc_loss.Tensor, _fake_ctc_loss),
    (aten._ctc_loss_backward.default, _fake_ctc_loss_backward),
    (aten._ctc_loss_backward.Tensor, _fake_ctc_loss_backward),
):
    fake_impls.op_implementations_dict.setdefault(_operator, _shape_function)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context without garbage collection, which takes a tenth of an export."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _no_stack_traces() -> contextlib.AbstractContextManager[None]:
    """Context in which nodes record no stack trace, a tenth of an export. 2.11 has no such flag."""
    if not hasattr(torch.fx.config, "do_not_emit_stack_traces"):
        return contextlib.nullcontext()
    return replaced(torch.fx.config, "do_not_emit_stack_traces", True)
