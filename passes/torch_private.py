"""Private names of torch that the passes need, each with its reason.

All of them exist in torch 2.11 to 2.15 unless a comment says otherwise. Supporting a newer torch
starts here: run the test suite, and repair what moved in this file.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

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
from torch.fx import Node
from torch.fx._lazy_graph_module import (
    _LazyGraphModule as LazyGraphModule,  # generates its code when it is first run
)
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # documented as functorch.make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv as ShapeEnv
from torch.fx.graph import _BoxedCodeGen  # frees inputs as they are used
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
SCALED_GROUPED_MM = aten._scaled_grouped_mm
CPU_FLASH_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")  # namespaces

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
    {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg}
)

# The generator around regions of torch.utils.checkpoint. The public function cannot be replaced:
# models import it by name. 2.14 renamed the generator; the old name is still there, and replacing
# it does nothing.
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator" + (
    "_impl"
    if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl")
    else ""
)


@contextlib.contextmanager
def compiling(flag: bool) -> Iterator[None]:
    """Context in which torch.compiler.is_compiling() and is_exporting() have this value.

    torch.export sets both flags around the trace; no public function sets them.
    """
    with (
        replaced(torch.compiler, "_is_compiling_flag", flag),
        replaced(torch.compiler, "_is_exporting_flag", flag),
    ):
        yield


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
def replaced_tolist(real_value: Any, symbols: Any) -> Iterator[None]:
    """Context in which `tensor.tolist()` returns the values of `real_value(tensor)`, or if that is
    None `symbols(tensor)`. torch's own reads an attribute of the traced tensor, which no dispatch
    mode sees."""
    original = FunctionalTensor.tolist

    def tolist(tensor: FunctionalTensor) -> Any:
        value = real_value(tensor)
        if value is None:
            numbers = symbols(tensor)
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


def annotations_of(node: Node) -> dict[str, Any]:
    """Returns the annotations of a node; an empty dict if it has none."""
    return node.meta.get(ANNOTATIONS) or {}


def schema_of(operator: Any) -> Any:
    """Returns the schema of an operator: its arguments and results, and which it writes."""
    return operator._schema


def has_kernel(operator: OpOverload) -> bool:
    """Returns True if the dispatcher has a kernel for an operator."""
    return torch._C._dispatch_has_kernel(operator.name())


READ_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""What a function mode sees when a tensor's version is read."""


def version_of(tensor: Tensor) -> int:
    """Returns how many times a tensor was written in place."""
    return tensor._version


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of `.grad`: `grad_dtype`, if it is set."""
    return parameter.grad_dtype or parameter.dtype


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which tensor subclasses do not intercept functions of torch."""
    return torch._C.DisableTorchFunctionSubclass()


def sharding_of(dtensor: Any) -> Any:
    """Returns the mesh, the placements and the full shape of a DTensor, without its values."""
    return dtensor._spec


def storage_key(tensor: Tensor) -> int:
    """Returns a key that tensors with one storage share. Fake tensors have no data pointer."""
    return tensor.untyped_storage()._cdata


def written_arguments(func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an in-place operator writes."""
    if not func._schema.is_mutable:
        return []
    return [
        args[index] if index < len(args) else kwargs.get(declared.name)
        for index, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]


def set_node_annotation(key: str, value: Any) -> None:
    """Annotates the nodes traced from now on in this thread with `meta["custom"][key]`."""
    current = fx_traceback.current_meta
    current["custom"] = {**current.get("custom", {}), key: value}


def remove_node_annotation(key: str) -> None:
    """Ends `set_node_annotation`."""
    current = fx_traceback.current_meta
    current["custom"] = dict(current.get("custom", {}))
    current["custom"].pop(key, None)


def is_any_autocast_enabled() -> bool:
    """Returns True inside of an autocast region for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def sequence_number(grad_fn: Any) -> int:
    """Returns the number by which `node.meta["seq_nr"]` names the operation of a grad_fn."""
    return int(grad_fn._sequence_nr())


def module_stack(node: Node) -> dict[str, tuple[str, Any]]:
    """Returns the modules that `node` ran in, outermost first: path and class by call."""
    return node.meta.get(MODULES) or {}


def module_paths(node: Node) -> list[str]:
    """Returns the paths of the modules that a node ran in, outermost first: `blocks`, `blocks.2`,
    `blocks.2.mlp`."""
    stack = module_stack(node).values()
    paths = [str(path).partition("@")[0] for path, _ in stack]  # @1: the second call of a module
    return [path.removeprefix("model.") for path in paths if path.startswith("model.")]


def attention_priority() -> tuple[int, ...]:
    """Returns the order in which attention tries its kernels."""
    return tuple(torch._C._get_sdp_priority_order())


def is_in_place(operator: object) -> bool:
    """Returns True if an operator writes an argument."""
    return isinstance(operator, OpOverload) and bool(operator._schema.is_mutable)


class _DirectCodeGen(_BoxedCodeGen):
    """Calls the C function behind an operator (`_op`) by a global name.

    The way through `torch.ops` and the operator's own Python `__call__` takes a microsecond, at
    thousands of operations per step.
    """

    def _gen_python_code(self, *args: Any, **options: Any) -> Any:
        code = super()._gen_python_code(*args, **options)
        nodes, _, namespace = args
        operators = {
            str(node.target): node.target for node in nodes if type(node.target) is OpOverload
        }

        def direct(call: re.Match[str]) -> str:
            operator = operators.get(call[1])
            if operator is None:
                return call[0]
            name = namespace.create_name(call[1].replace(".", "_"), operator)  # not that of a value
            code.globals[name] = operator._op
            return f"{name}("

        code.src = re.sub(r"\btorch\.ops\.([\w.]+)\(", direct, code.src)
        return code


_BOXED: WeakKeyDictionary[torch.fx.GraphModule, torch.fx.GraphModule] = WeakKeyDictionary()


def boxed(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy of `module` that takes one list and empties it, so that each input is freed at
    its last use. The copy is cached: neither may be modified afterwards."""
    if module not in _BOXED:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph.set_codegen(_DirectCodeGen())
        _BOXED[module] = torch.fx.GraphModule(module, graph, class_name=type(module).__name__)
    return _BOXED[module]


def tensor_tables(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields the table, the name in it and the tensor for every parameter and buffer."""
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor


def buffer_table(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Returns the buffers of `module` itself. An entry assigned here is no attribute that the user
    sets."""
    return module._buffers


def group_called(name: str) -> torch.distributed.ProcessGroup:
    """Returns the process group of a name, by which functional collectives find it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, no-any-return]


def profiler_is_on() -> bool:
    """Returns True if a profiler records in this thread. `record_function` costs microseconds even
    without one."""
    return torch.autograd._profiler_enabled()
