"""The private names of torch that the exported step needs, each with its reason.

All of them exist in torch 2.11 to 2.15 unless a comment says otherwise. Supporting a newer torch
starts here.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import (
    OpOverload as OpOverload,  # the class of torch.ops.aten.add.Tensor
    OpOverloadPacket as OpOverloadPacket,  # the class of torch.ops.aten.add
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import (
    _LazyGraphModule as LazyGraphModule,  # generates its code when it is first run
)
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # documented as functorch.make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
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
MODULES = "nn_module_stack"  # key in node.meta of the modules that a node ran in

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


def not_compiling() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which torch.compiler.is_compiling() and is_exporting() are False.

    torch.export sets both flags around the trace; no public function sets them.
    """
    return compiling(False)


@contextlib.contextmanager
def compiling(flag: bool) -> Iterator[None]:
    """Context in which both flags have this value."""
    compiler = torch.compiler
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = flag
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags


@contextlib.contextmanager
def data_assignments(call: Callable[[], None]) -> Iterator[None]:
    """Context in which Python calls `call` before it assigns to the `.data` of a tensor."""
    original: Any = torch._C.TensorBase.data

    def assign(tensor: Tensor, value: Tensor) -> None:
        call()
        original.__set__(tensor, value)

    torch.Tensor.data = property(original.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute `name` of a module or class is `value`."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def real_mode() -> Iterator[None]:
    """Context outside of the trace: operations run for real and are seen by no mode."""
    with _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def replaced_tolist(known_value: Any, stand_ins: Any) -> Iterator[None]:
    """Context in which `tensor.tolist()` returns the values of `known_value(tensor)`, or if that is
    None `stand_ins(tensor)`. torch's own reads an attribute of the traced tensor, which no dispatch
    mode sees."""
    original = FunctionalTensor.tolist

    def tolist(tensor: FunctionalTensor) -> Any:
        value = known_value(tensor)
        if value is None:
            numbers = stand_ins(tensor)
            return original(tensor) if numbers is None else numbers
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


READ_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""What a function mode sees when a tensor's version is read."""


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
