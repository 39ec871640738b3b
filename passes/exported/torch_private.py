"""The private names of torch that the exported step needs, each with its reason.

All of them exist in torch 2.11 to 2.15 unless a comment says otherwise. Supporting a newer torch
starts here.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import (
    OpOverload as OpOverload,  # the class of torch.ops.aten.add.Tensor
    OpOverloadPacket as OpOverloadPacket,  # the class of torch.ops.aten.add
)
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import ExportedProgram
from torch.export._trace import _export  # torch.export.export keeps composite operations whole
from torch.fx._lazy_graph_module import (
    _LazyGraphModule as LazyGraphModule,  # generates its code when it is first run
    _use_lazy_graph_module,
)
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # documented as functorch.make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.nn.utils.stateless import (
    _reparametrize_module as reparametrize_module,  # functional_call ends before the backward
)
from torch.utils import _pytree as pytree  # torch.export flattens with it
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
)

reparametrize_module = reparametrize_module
pytree = pytree
LazyGraphModule = LazyGraphModule
aten = torch.ops.aten

# Operators that torch has under private names only.
TO_COPY = aten._to_copy.default  # what a cast becomes
UNSAFE_VIEW = aten._unsafe_view.default
READ_SCALAR = aten._local_scalar_dense.default  # what Tensor.item becomes
GROUPED_MM = aten._grouped_mm
CPU_FLASH_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

ANNOTATIONS = "custom"  # key in node.meta of what torch.fx.traceback.annotate adds

# Raised if Python reads a value, or a shape, that depends on the inputs.
DATA_DEPENDENT_ERRORS = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)

# Shapes are static: these nodes compute nothing.
ASSERTIONS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
    }
)

# Checkpointed regions of torch.utils.checkpoint; 2.14 renamed the generator.
_CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator" + (
    "_impl"
    if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else ""
)


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
            while _is_our_function_mode_on():  # Dynamo would trace them
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(torch.compiler.set_stance("default"))
            stack.enter_context(_compiling(True))
            yield stack.enter_context(original())

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("setup_compilation_env") is original:
                stack.enter_context(replaced(module, "setup_compilation_env", environment))
        yield


def _is_our_function_mode_on() -> bool:
    stack = _get_current_function_mode_stack()
    return bool(stack) and type(stack[-1]).__module__.startswith("zbcompile")


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


def not_compiling() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which torch.compiler.is_compiling() and is_exporting() are False.

    torch.export sets both flags around the trace; no public function sets them.
    """
    return _compiling(False)


@contextlib.contextmanager
def _compiling(flag: bool) -> Iterator[None]:
    compiler = torch.compiler
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = flag
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute `name` of a module or class is `value`."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


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


# Results whose strides torch's fake tensors (2.11 to 2.13) compute differently from the kernels:
# as the sum of the first two operands, as the second operand, or contiguous.
_STRIDES_OF_SUM = frozenset(
    {
        *(aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default),
        *(aten.native_dropout_backward.default, aten.elu_backward.default),
        *(aten.hardsigmoid_backward.default, aten.hardswish_backward.default),
        *(aten.hardtanh_backward.default, aten.logit_backward.default),
        aten.softplus_backward.default,
    }
)
_STRIDES_OF_SECOND = frozenset({aten.binary_cross_entropy_backward.default})
_CONTIGUOUS = frozenset(
    {
        *(aten.pow.Scalar, aten.isin.Tensor_Scalar, aten.log_sigmoid_forward.default),
        *(aten.normal.float_Tensor, aten.poisson.default, aten.rrelu_with_noise.default),
        *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default),
        *(aten.huber_loss_backward.default, aten._log_softmax_backward_data.default),
        aten.native_layer_norm_backward.default,
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
        if func in _CONTIGUOUS:
            return torch.utils._pytree.tree_map_only(
                Tensor, functools.partial(_contiguous_like, mode), result
            )
        if func in _STRIDES_OF_SUM or func in _STRIDES_OF_SECOND:
            with mode:
                like = torch.add(args[0], args[1]) if func in _STRIDES_OF_SUM else args[1]
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


fake_impls.op_implementations_dict.setdefault(aten._grouped_mm.default, _fake_grouped_mm)


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


@contextlib.contextmanager
def real_mode() -> Iterator[None]:
    """Context outside of the trace: operations run for real and are seen by no mode."""
    with _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def replaced_tolist(known_value: Any) -> Iterator[None]:
    """Context in which `tensor.tolist()` returns the values of `known_value(tensor)` if that is not
    None. torch's own reads an attribute of the traced tensor, which no dispatch mode sees."""
    original = FunctionalTensor.tolist

    def tolist(tensor: FunctionalTensor) -> Any:
        value = known_value(tensor)
        if value is None:
            return original(tensor)
        with real_mode():
            return value.tolist()

    with replaced(FunctionalTensor, "tolist", tolist):
        yield


def is_unlifted_constant(tensor: Tensor) -> bool:
    """Returns True for a plain tensor inside of a trace, such as the result of torch.tensor(1)."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def annotations_of(node: torch.fx.Node) -> dict[str, Any]:
    """Returns the annotations of a node; an empty dict if it has none."""
    return node.meta.get(ANNOTATIONS) or {}


def schema_of(operator: OpOverload) -> Any:
    """Returns the schema of an operator: its arguments and results, and which it writes."""
    return operator._schema


def has_kernel(operator: OpOverload) -> bool:
    """Returns True if the dispatcher has a kernel for an operator."""
    return torch._C._dispatch_has_kernel(operator.name())


def plain_hooks(tensor: Tensor) -> Any:
    """Returns the hooks that `register_hook` added, by number; None if there are none."""
    return tensor._backward_hooks


def version_of(tensor: Tensor) -> int:
    """Returns how many times a tensor was written in place."""
    return tensor._version


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which tensor subclasses do not intercept functions of torch."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_key(tensor: Tensor) -> int:
    """Returns a key that tensors with one storage share. Fake tensors have no data pointer."""
    return tensor.untyped_storage()._cdata


def is_view(node: torch.fx.Node) -> bool:
    """Returns True if the result of a node aliases its input."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return target is aten._unsafe_view.default or any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in target._schema.returns
    )


def argument(target: Any, args: Any, kwargs: Any, name: str, default: Any = None) -> Any:
    """Returns the argument `name` of an operator call; `default` if the operator has none."""
    if not isinstance(target, OpOverload):
        return default
    for index, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            positional = args[index] if index < len(args) else declared.default_value
            return kwargs.get(name, positional)
    return default


def draws_numbers(target: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if a call draws random numbers. Attention with `dropout_p=0` draws none."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(argument(target, args, kwargs, "dropout_p", 1.0) != 0.0)


def written_arguments(func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an in-place operator writes."""
    if not func._schema.is_mutable:
        return []
    return [
        args[index] if index < len(args) else kwargs.get(declared.name)
        for index, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]


@contextlib.contextmanager
def replaced_checkpoint_regions(generator: Any, function: Any) -> Iterator[None]:
    """Context in which torch.utils.checkpoint runs `generator` around each region.

    `function` replaces CheckpointFunction, the reentrant kind. The public function itself cannot
    be replaced, because models import it by name.
    """
    checkpoint = torch.utils.checkpoint
    with (
        replaced(checkpoint, _CHECKPOINT_GENERATOR, generator),
        replaced(checkpoint, "CheckpointFunction", function),
    ):
        yield


def set_node_annotation(key: str, value: Any) -> None:
    """Annotates the nodes traced from now on in this thread with `meta["custom"][key]`."""
    current = fx_traceback.current_meta
    current["custom"] = {**current.get("custom", {}), key: value}


def remove_node_annotation(key: str) -> None:
    """Ends `set_node_annotation`."""
    current = fx_traceback.current_meta
    current["custom"] = {k: v for k, v in current.get("custom", {}).items() if k != key}


def is_any_autocast_enabled() -> bool:
    """Returns True inside of an autocast region for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def sequence_number(grad_fn: Any) -> int:
    """Returns the number by which `node.meta["seq_nr"]` names the operation of a grad_fn."""
    return int(grad_fn._sequence_nr())
