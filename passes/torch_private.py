"""Every private PyTorch name that the passes use: no public name does what is said of it.

All of them exist in torch 2.11 to 2.15; `Change` says what differs between these. Supporting a
newer torch starts here: run the test suite, and repair what moved in this file.
"""

import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,  # the class of torch.ops.higher_order.*
    OpOverload as OpOverload,  # the class of torch.ops.aten.*.*
)
from torch._subclasses import (
    functional_tensor,  # what AOTAutograd functionalises with
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor as FakeTensor,  # no public name for the class
    FakeTensorMode as FakeTensorMode,  # shapes without memory
    # by an operator without a shape function
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch.fx import Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # documented as functorch.make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import (
    _BoxedCodeGen,
)  # the only code generator that frees inputs as they are used
from torch.utils import _pytree as pytree  # torch.export uses it; torch.utils.pytree is newer
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,  # sees every operation
)

pytree = pytree
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


class Change(Enum):
    """What differs between the releases of torch, from which one on, and how a release is known
    that has it."""

    CHECKPOINTS = (
        (2, 14),
        (
            "`torch.utils.checkpoint` runs another generator; the old name is still there, and"
            " replacing it does nothing"
        ),
        lambda: hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl"),
    )
    CHANNELS = (
        (2, 15),
        "a `PipelineStage` may have a group for each direction between two ranks",
        lambda: hasattr(
            import_module("torch.distributed.pipelining").PipelineStage, "_get_p2p_group"
        ),
    )

    def __init__(self, since: tuple[int, int], what: str, is_here: Callable[[], bool]) -> None:
        self.since, self.what, self.is_here = since, what, is_here


# A graph module that writes its code when it is first run or printed; most of ours never are. Its
# `forward`, kept as a function, takes the slow path; `boxed` takes the fast one.
LazyGraphModule = LazyGraphModule
aten = torch.ops.aten

# What is raised if something depends on a value that a trace does not have.
DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
)
# What torch.export makes of checks of shapes and values, its own and the model's.
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
)
# The CPU's attention kernel and its gradient; joint graphs call them by these names.
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# CUDA's.
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention.default
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default
ATTENTION_BY_FORMULA = aten._scaled_dot_product_attention_math.default  # what SDPBackend.MATH runs
# what torch.nn.functional.grouped_mm calls
GROUPED_PRODUCTS = (
    aten._grouped_mm,
    aten._scaled_grouped_mm,
)


# What reshape, casts and log_softmax become in some graphs; no public operator has these names.
UNSAFE_VIEW, TO_COPY, LOG_SOFTMAX = (
    aten._unsafe_view.default,
    aten._to_copy.default,
    aten._log_softmax.default,
)


ANNOTATIONS = "custom"


def stack_trace(node: Node) -> str:
    """The Python lines that made `node`, innermost last, as a traceback prints them; "" if
    unknown."""
    return node.meta.get("stack_trace") or ""


def set_stack_trace(node: Node, text: str) -> None:
    """Replace what `stack_trace` says of `node`."""
    node.meta["stack_trace"] = text


def annotated_line(node: Any) -> str | None:
    """Returns the `file:line` of a node of an exported step; None for nodes of other graphs."""
    annotations = node.meta.get("custom")
    return None if annotations is None else str(annotations.get("line", ""))


def module_stack(node: Node) -> dict[str, tuple[str, Any]]:
    """The modules that `node` ran in, outermost first: their paths with the path and the class of
    each."""
    return node.meta.get("nn_module_stack") or {}


def module_paths(node: Node) -> list[str]:
    """The modules that a node ran in, outermost first: `blocks`, `blocks.2`, `blocks.2.mlp`."""
    stack = module_stack(node).values()
    paths = [str(path).partition("@")[0] for path, _ in stack]  # @1: the second call of a module
    return [path.removeprefix("model.") for path in paths if path.startswith("model.")]


def attention_priority() -> tuple[int, ...]:
    """The order in which attention tries its kernels."""
    return tuple(torch._C._get_sdp_priority_order())


def fake_mode_of(value: torch.Tensor) -> FakeTensorMode:
    """The mode that a fake tensor belongs to."""
    return value.fake_mode  # type: ignore[attr-defined, no-any-return]


def written_so_far(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, through any view but `.data`; what autograd
    compares."""
    return tensor._version


def is_in_place(operation: object) -> bool:
    """Whether `operation` works in place."""
    return isinstance(operation, OpOverload) and bool(operation._schema.is_mutable)


def written_arguments(
    operation: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """The arguments that `operation` writes, each a tensor or a list."""
    if not is_in_place(operation):
        return []
    declared = operation._schema.arguments  # type: ignore[attr-defined]
    given = dict(zip((each.name for each in declared), args, strict=False)) | dict(kwargs)
    writes = (
        each.name for each in declared if each.alias_info is not None and each.alias_info.is_write
    )
    return [given[name] for name in writes if given.get(name) is not None]


def is_composite(operation: OpOverload) -> bool:
    """Whether an operation is composed of other operations."""
    return operation._can_decompose()


def arguments_of(operation: OpOverload) -> list[Any]:
    """The declared arguments of an operator, each with `name` and `default_value`."""
    return list(operation._schema.arguments)


class _DirectCodeGen(_BoxedCodeGen):
    """Calls the C function behind an operator, by a global name: the way through `torch.ops` and
    the operator's own Python `__call__` take a microsecond, at thousands of operations per step
    (`_op` is what that calls).
    """

    def _gen_python_code(self, *args: Any, **options: Any) -> Any:
        code = super()._gen_python_code(*args, **options)
        nodes, _, namespace = args
        called = {
            str(node.target): node.target for node in nodes if type(node.target) is OpOverload
        }

        def direct(call: re.Match[str]) -> str:
            operator = called.get(call[1])
            if operator is None:
                return call[0]
            name = namespace.create_name(call[1].replace(".", "_"), operator)  # not that of a value
            code.globals[name] = operator._op
            return f"{name}("

        code.src = re.sub(r"\btorch\.ops\.([\w.]+)\(", direct, code.src)
        return code


_BOXED: WeakKeyDictionary[torch.fx.GraphModule, torch.fx.GraphModule] = WeakKeyDictionary()


def boxed(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of `module` that takes one list and empties it: each input is freed at its last use.
    It is made once per module and shared, so neither may be modified afterwards."""
    if module not in _BOXED:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph.set_codegen(_DirectCodeGen())
        _BOXED[module] = torch.fx.GraphModule(module, graph, class_name=type(module).__name__)
    return _BOXED[module]


_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FORWARD_HOOK_OPTIONS = (
    *(f"{kind}_with_kwargs" for kind in _FORWARD_HOOKS),
    "_forward_hooks_always_called",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Returns the numbers of the hooks of `module` and of its parameters; torch gives each a new
    one."""
    found = [
        number
        for kind in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
        for number in getattr(module, kind, ())
    ]
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in module._parameters.values():
            if tensor is not None and tensor._backward_hooks:
                found += tensor._backward_hooks
    return tuple(found)


def forward_hook_tables(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The tables that hold the hooks of `module`, and how each is called."""
    return [
        getattr(module, kind)
        for kind in (*_FORWARD_HOOKS, *_FORWARD_HOOK_OPTIONS, *_BACKWARD_HOOKS)
    ]


def global_hooks() -> list[str]:
    """The kinds of hook registered for all modules."""
    kinds = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
    return [
        kind.strip("_")
        for kind in kinds
        if getattr(torch.nn.modules.module, f"_global{kind}", None)
    ]


def function_modes() -> tuple[type, ...]:
    """The classes of the torch function modes that are on."""
    return tuple(map(type, torch.overrides._get_current_function_mode_stack()))


def tensor_hooks(tensor: torch.Tensor) -> list[str]:
    """The kinds of hook registered on `tensor`."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [kind.strip("_") for kind in kinds if getattr(tensor, kind, None)]


def accumulators(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes by which autograd adds to the gradients of those that train; hooks on them stay as
    long as they do."""
    leaves = (
        each
        for each in tensors
        if each.requires_grad and each.is_leaf and not torch.nn.parameter.is_lazy(each)
    )
    with torch._C.DisableTorchFunctionSubclass():  # their values are not read
        return [torch.autograd.graph.get_gradient_edge(each).node for each in leaves]


def have_hooks(nodes: Sequence[Any]) -> bool:
    """Whether any of these nodes has a hook. It holds them in mappings that only the garbage
    collector can name, in 50 nanoseconds per node."""
    return any(isinstance(each, dict) and each for each in gc.get_referents(*nodes))


def accumulation_hooks(tensor: torch.Tensor) -> list[str]:
    """Names the kind of hook on the node by which autograd adds to `tensor.grad`, if there
    is one."""
    return (
        ["hooks on the node that accumulates its gradient"]
        if have_hooks(accumulators([tensor]))
        else []
    )


def tensor_tables(
    model: torch.nn.Module,
) -> Iterator[tuple[dict[str, torch.Tensor], str, torch.Tensor]]:
    """Every place where a module keeps a parameter or buffer: the table, the name in it, and the
    tensor."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor  # type: ignore[misc]


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of `module` itself; an entry assigned here is no attribute set by the user."""
    return module._buffers


def group_called(name: str) -> torch.distributed.ProcessGroup:
    """The process group of this name, by which functional collectives find it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, no-any-return]


# The libraries of the functional collectives, and where their autograd functions are defined.
FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")


AUTOCAST = "zbcompile.autocast"


@contextlib.contextmanager
def replaced(owner: type | ModuleType, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def fake_of(value: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A meta tensor as a fake one on `device`, over the same storage (what FakeTensorMode does
    itself)."""
    return FakeTensor(mode, value, device)


def storage_key(value: torch.Tensor) -> int:
    """A key shared by tensors, also fake ones, that alias one storage (a fake storage has no data
    pointer); under vmap, that of the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.untyped_storage()._cdata


def functional(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` without in-place operations below autograd (torch.func.functionalize acts above it
    only)."""
    return functional_tensor.dispatch_functionalize(run, functional_tensor.FunctionalTensorMode())
