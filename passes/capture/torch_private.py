"""The private PyTorch names behind what capture changes in torch.export while it runs, and behind its operators."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch._C import DispatchKey  # which of an operator's kernels is meant
from torch._export import utils as _export_utils  # see `quick_decompositions`
from torch.autograd.function import _HookMixin  # see `told_of_hooks_on_nodes`
from torch.fx import Graph, GraphModule, _symbolic_trace  # see `own_functions`
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # see `release_caches`
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES_MODULE,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    nowhere_traced,
    replaced,
    tensor_tables,
    told_of_calls,
)

aten = torch.ops.aten
CACHED_SHAPES = 4096  # about 2.5 kB each
_OPERATORS = torch.library.Library("zbcompile", "DEF")


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
    alone uses (`OpOverload.py_impl`). It is mathematically equal but not bit for bit: the gradient of a dropout, for
    one, is scaled by another rounding of 1 / (1 - p).

    Random numbers that nothing needs are drawn in eager too; torch.export forgets them unless inductor's fallback to
    eager's random numbers is asked for (`Graph.eliminate_dead_code` looks there).
    """
    # Documented as torch._inductor.config. Here, as torch._dynamo comes with it: half of what importing
    # zbcompile would take.
    from torch._inductor import config as inductor_config

    kept = [(operator, dict(operator.py_kernels)) for operator in _rewritten()]
    try:
        for operator, _ in kept:
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        with inductor_config.patch(fallback_random=True):
            yield
    finally:
        for operator, kernels in kept:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def whole_regions() -> Iterator[None]:
    """Around torch.export, which forgets a region (no_grad, autocast) that calls another graph (torch.cond,
    flex_attention) or stands inside an autocast region: what begins the region is then not the first node of its graph,
    where alone torch looks for it. They also delete that graph, as if it were unused."""
    from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass

    with contextlib.ExitStack() as stack:
        for module in (replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass):
            begin = getattr(module, "_is_set_grad_enabled_node", None) or module._is_enter_autocast_node
            stack.enter_context(replaced(module, "nodes_first", functools.partial(_beginning, begin)))
        stack.enter_context(replaced(GraphModule, "delete_all_unused_submodules", _delete_unused))
        yield


def _delete_unused(module: GraphModule) -> None:
    """Delete what no node names; what is used keeps all that is in it."""
    used = {str(node.target).partition(".")[0] for node in module.graph.nodes if node.op in ("call_module", "get_attr")}
    for name in module._modules.keys() - used:
        delattr(module, name)


def _beginning(begin: Callable[[Any], Any], nodes: Any, _: Any) -> Any:
    return next((node for node in nodes if begin(node)), None)


def quick_decompositions() -> contextlib.AbstractContextManager[None]:
    """Around `run_decompositions`, which lists the composite operators once for each of 28 operator libraries: 60 ms
    of a compile, which takes a second for two layers and two and a half for eight."""
    list_operators = functools.cache(_export_utils._materialize_cpp_cia_ops)
    return replaced(_export_utils, "_materialize_cpp_cia_ops", list_operators)


@contextlib.contextmanager
def instead_of_function_apply(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, `apply(original, cls, args, kwargs)` runs for every call of an autograd.Function.

    torch.export traces through `forward` and silently loses `backward`. Models keep `MyFunction.apply` in a variable,
    so the function behind all of these gets other code, and with it `apply` as a default.
    """
    function: Any = vars(torch.autograd.Function)["apply"].__func__
    __class__ = code = function.__code__
    original = FunctionType(code, function.__globals__, closure=function.__closure__)

    def instead(cls: Any, *args: Any, _apply: Callable[..., Any], **kwargs: Any) -> Any:
        __class__  # noqa: B018 (`super()` reads it in the original: code of a function keeps its number of such variables)
        return _apply(cls, args, kwargs)

    before = function.__kwdefaults__
    function.__kwdefaults__ = {"_apply": lambda cls, *given: apply(functools.partial(original, cls), cls, *given)}
    function.__code__ = instead.__code__
    try:
        yield
    finally:
        function.__code__, function.__kwdefaults__ = code, before


def instead_of_module_call(call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, `call(original, module, args, kwargs)` runs for every call of a module, hooks included: torch.export
    replaces `__call__` by one that calls the original, and that calls this."""
    original = torch.nn.Module._call_impl
    return replaced(torch.nn.Module, "_call_impl", lambda module, *args, **kwargs: call(original, module, args, kwargs))


def without_empty_conversions() -> contextlib.AbstractContextManager[None]:
    """Let `module.to(dtype)` do nothing where it changes nothing, as in layers that make sure of their router's dtype:
    torch asks for gradients, and puts every tensor in its own place again."""
    convert = torch.nn.Module._apply

    def applied(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        with nowhere_traced(), torch.no_grad():
            changes = any(function(tensor) is not tensor for _, _, tensor in tensor_tables(module))
        return convert(module, function, recurse) if changes else module

    return replaced(torch.nn.Module, "_apply", applied)


def unchecked_distributions() -> contextlib.AbstractContextManager[None]:
    """Turn off the checks of torch.distributions, as python -O does: they decide by values, and change none (a public
    function sets the default, none reads it)."""
    return replaced(torch.distributions.Distribution, "_validate_args", False)


def own_functions() -> contextlib.AbstractContextManager[None]:
    """Leave functions that torch.fx.wrap has marked in the globals of a user's module. A trace would put others in
    their places, which only help to trace with proxies, and be read as what forward uses."""
    return replaced(_symbolic_trace, "_patch_wrapped_functions", lambda patcher: None)


def traced_graph() -> Graph | None:
    """The graph that gets the operations which are called now; None if they are not traced."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def waiting_collectives() -> contextlib.AbstractContextManager[None]:
    """Inside, functional collectives wait at once, as in a trace (they ask this function)."""
    module = sys.modules.get(FUNCTIONAL_COLLECTIVES_MODULE)
    return contextlib.nullcontext() if module is None else replaced(module, "_are_we_tracing", lambda: True)


def below_autograd() -> bool:
    """Whether a kernel runs where autograd cannot act, whatever is enabled."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)


def composite_operator(schema: str, kernel: Callable[..., Any], draws: bool = False) -> OpOverload:
    """Define an operator of ours whose `kernel` runs above autograd; `draws` if it may draw random numbers.

    torch.export keeps such operators whole (as it keeps its own composite ones)."""
    name = schema.partition("(")[0]
    _OPERATORS.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if draws else ())
    _OPERATORS.impl(name, kernel, "CompositeImplicitAutograd")
    operator: OpOverload = getattr(torch.ops.zbcompile, name).default
    return operator


def is_fake_of(value: Any, mode: FakeTensorMode) -> bool:
    """Whether a tensor, or what a subclass or torch.func wraps, was made in `mode`."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return is_fake_of(torch._C._functorch.get_unwrapped(value), mode)
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return all(is_fake_of(getattr(value, name), mode) for name in names)
    if isinstance(value, FakeTensor):
        return value.fake_mode is mode
    return bool(value.is_meta)  # of which torch makes a fake one


def release_caches() -> None:
    """Let go of what torch has cached for graphs that are finished. Its cache of shapes has no limit, and the last 256
    entries of ShapeEnv's caches keep their graphs' alive."""
    if FakeTensorMode.cache_info().size > CACHED_SHAPES:
        FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def release_shapes(graph: Graph) -> None:
    """Empty what a finished graph's ShapeEnv keeps: it reaches itself by sizes that gc does not see."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and (shapes := value.fake_mode.shape_env) is not None:
            shapes.fake_tensor_cache.clear()
            shapes.tracked_fakes = None
            return


def told_of_hooks_on_nodes(tell: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, `tell` is called as a hook is registered on a node of autograd (in C++, which asks this method for a
    mapping to keep the hook in)."""
    return told_of_calls(_HookMixin, "_register_hook", tell)
