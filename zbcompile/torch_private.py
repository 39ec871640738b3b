"""Every private PyTorch name that the runtime uses, as `passes/torch_private.py` has those of the
passes."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree  # torch.export's own pytree; torch.utils.pytree is newer

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.torch_private import is_in_place, make_fx, replaced
from zbcompile.passes.torch_private_hooks import hooks_of, tensor_hooks

pytree = pytree
READ_SCALAR = torch.ops.aten._local_scalar_dense.default  # what Tensor.item calls
TRIED = ("2.11", "2.13", "2.14", "2.15")  # CONTRIBUTING.md says with which tests


@functools.cache
def warn_of_untried(version: str) -> None:
    """Say once that zbcompile has not been tried with this release of torch."""
    if ".".join(version.split(".")[:2]) not in TRIED:
        tried = f"zbcompile has been tried with torch {', '.join(TRIED)}, not with {version}"
        text = (
            f"{tried}: compare a first step with eager mode, as examples/train_gpt.py --verify"
            " does."
        )
        warnings.warn(text, stacklevel=4)


def fingerprint(model: torch.nn.Module, modes: bool = True) -> tuple[Any, ...]:
    """Returns what a compiled step assumes about a model, as values to compare: its modules and
    their hooks, its tensors, their kinds and hooks; with `modes` also which modules are in training
    mode and the dtypes of gradients. One walk without names, because every step does it.
    """
    values: list[Any] = []
    modules, visited = [model], {id(model)}
    while modules:
        module = modules.pop()
        values += (id(module), type(module), modes and module.training, hooks_of(module))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                trains = tensor.requires_grad
                values += (id(tensor), trains, tensor.dtype, tensor.shape, tensor.device)
                values.append(modes and trains and getattr(tensor, "grad_dtype", None))
                values.append(bool(tensor_hooks(tensor)))
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                modules.append(child)
    return tuple(values)


def exchanged(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends part i of `rows` to rank i of a group and receives part i of the result from it.

    `group` is a name. Gradients are exchanged in the same way. The functional collectives, which a
    trace records as operations, have no public name.
    """
    from torch.distributed import _functional_collectives as collectives

    along = (
        collectives.all_to_all_single_autograd
        if rows.requires_grad
        else collectives.all_to_all_single
    )
    return along(rows, None, None, group)


def wrapper_like(cls: Any, like: torch.Tensor) -> Any:
    """Returns a tensor of a subclass that has no memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, dtype=like.dtype, device=like.device
    )  # type: ignore


def apply_to(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Converts the tensors of a module as `module.to` does: its class may do more."""
    module._apply(convert)


def replace_tensors(
    module: torch.nn.Module, parameter: Callable[[Any], Any], buffer: Callable[[Any], Any]
) -> None:
    """Replaces the parameters and buffers of a module (setattr would register them again)."""
    tables: list[tuple[dict[str, Any], Callable[[Any], Any]]]
    tables = [(module._parameters, parameter), (module._buffers, buffer)]
    for table, make in tables:
        table.update({name: make(value) for name, value in table.items() if value is not None})


def before_clipping(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Makes torch's clip_grad_norm_ call `check` with the parameters before it scales gradients.

    A second call with the same `check` changes nothing. clip_grad_norm_ looks up the function that
    scales by this name, also where it was imported earlier. A call of `clip_grads_with_norm_` from
    torch.nn.utils passes its own norm and is not checked.
    """
    scale = clip_grad._clip_grads_with_norm_
    if getattr(scale, "check", None) is check:
        return

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(tensors)
        scale(tensors, *args, **kwargs)

    checked.check = check  # type: ignore[attr-defined]
    clip_grad._clip_grads_with_norm_ = checked


def groups_of_process() -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that this process is in, by name."""
    groups = [
        group
        for group in dist.distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup)
    ]
    return {str(group.group_name): tuple(dist.get_process_group_ranks(group)) for group in groups}


def group_between(stage: Any, source: int, destination: int) -> dist.ProcessGroup | None:
    """The group in which a PipelineStage sends from one stage to another: there may be one for each
    direction (torch.distributed.config.pipeline_per_edge_p2p)."""
    if hasattr(stage, "_get_p2p_group"):  # torch 2.15
        return stage._get_p2p_group(source, destination)  # type: ignore[no-any-return]
    return stage.group  # type: ignore[no-any-return]


# Attributes that torch's own optimizers write in a step.
SET_BY_STEP = {"_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without the hooks that torch runs around the step of every class (it marks
    the function in which it has wrapped the class's own)."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def gloo_link(store: dist.Store, rank: int, timeout: timedelta) -> Any:
    """A gloo group that is not registered with torch.distributed. The class is public, its
    constructor not documented (torch.distributed._dist2 makes groups so)."""
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def nccl_link(store: dist.Store, rank: int, timeout: timedelta, ranks: tuple[int, int]) -> Any:
    """Returns an NCCL group of two ranks on a high-priority stream.

    The group is not bound to a device, so it is not split from another communicator, which all
    ranks would have to call (as `gloo_link`). Dumps of torch's flight recorder
    name it by its `ranks`, source and destination.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.group_name = f"zbcompile {ranks[0]}>{ranks[1]}"  # type: ignore[assignment]  # a NewType of str
    options.global_ranks_in_group = list(ranks)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def is_bound(group: dist.ProcessGroup | None) -> bool:
    """Returns True if `init_process_group` received a device_id. New groups are then split from
    this one by all of its ranks."""
    return getattr(group, "bound_device_id", None) is not None


@contextlib.contextmanager
def no_graphs_printed() -> Iterator[None]:
    """Inside, torch prints no graph to stderr if an export, or code that it generated, fails (by
    `print`, which these modules are given one of their own for)."""
    from torch.export import _trace

    places: list[Any] = [_trace, torch.fx.graph_module]
    for module in places:
        module.print = lambda *_, **__: None
    try:
        yield
    finally:
        for module in places:
            del module.print


# Inductor's options besides the user's torch._inductor.config: eager's random numbers (inductor's
# generator draws others) in eager's order, and no CUDA graphs (zbcompile captures its passes).
INDUCTOR = {"fallback_random": True, "reorder_for_locality": False, "triton.cudagraphs": False}


def inductor_compile(
    module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[Callable[[list[Any]], Sequence[torch.Tensor]], bool]:
    """Returns a graph of ATen operations compiled for fake inputs, a function of one list that it
    empties, and whether inductor's cache had it. Results get the strides of the fake values that
    the graph's output nodes have.

    torch.compile and torch._inductor.compile would make additions into an input functional and copy
    the sums back, and their callables keep inputs alive until they return. So the graph is
    compiled by the function below them, `compile_fx_inner`. Its result leaves operations in place
    and frees inputs as they are used. Inductor's cache needs the ShapeEnv of a tracing context.
    """
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._library.utils import mutates_and_returns_first_arg

    mode = detect_fake_mode(inputs)
    expected = [value.meta["val"].stride() for value in output_values(module.graph)]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        results = zip(module(*values), expected, strict=True)
        return [_with_strides(result, strides) for result, strides in results]

    with (
        config.patch(INDUCTOR),
        torch.no_grad(),
        tracing(TracingContext(mode)),
        _reads_after_writes(),
    ):
        rules = {op: rule for op, rule in select_decomp_table().items() if not is_in_place(op)}
        cat = torch.ops.aten.cat.default
        rules[cat] = _with_strides_of_eager(rules[cat])
        lowered = make_fx(run, decomposition_table=rules)(*inputs)
        for node in lowered.graph.nodes:
            if is_in_place(node.target) and mutates_and_returns_first_arg(node.target):
                _keep_in_place(node.target)
                # Inductor takes the result of an operation that it calls for another tensor, and
                # drops what is added into it.
                node.replace_all_uses_with(node.args[0])
        output = lowered.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(expected)))
        hits = counters["inductor"]["fxgraph_cache_hit"]
        compiled = compile_fx_inner(lowered, list(inputs), is_inference=True)
    return compiled, counters["inductor"]["fxgraph_cache_hit"] > hits  # type: ignore[return-value]


def _with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Returns `value`, copied if its strides are others: inductor's rules may have changed them."""
    if value.stride() == strides:
        return value
    order = sorted(range(value.ndim), key=strides.__getitem__, reverse=True)
    places = [order.index(dimension) for dimension in range(value.ndim)]
    return value.permute(order).contiguous().permute(places)


def _with_strides_of_eager(cat: Callable[..., Any]) -> Callable[..., Any]:
    """Returns inductor's rule for `aten.cat`, with a result as dense as eager mode's: of a single
    tensor that is not empty it keeps the strides, with which a later view may be impossible."""
    from torch._prims_common import suggest_memory_format

    def rule(*args: Any) -> Any:
        result = cat(*args)
        if result is NotImplemented:
            return result
        return result.contiguous(memory_format=suggest_memory_format(result))

    return rule


def _reads_after_writes() -> contextlib.AbstractContextManager[None]:
    """Context in which a C++ kernel that inductor fuses reads a tensor after the operation that
    wrote it in place. As it fits the loops of a kernel, inductor (2.11 to 2.13) forgets that the
    tensor has been written since, and the kernel may run first."""
    from torch._inductor.scheduler import SchedulerNode

    fit = SchedulerNode.recompute_size_and_body

    def remember(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        fit(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return replaced(SchedulerNode, "recompute_size_and_body", remember)


def _keep_in_place(operation: Any) -> None:
    """Makes inductor call an operation unchanged that it has no rule for.

    The fallback that inductor registers itself is refused if the environment variable CI is set,
    and does not tell the kernels around the operation that its first argument is written.
    """
    from torch._inductor.lowering import lowerings, make_fallback
    from torch._inductor.virtualized import V

    if operation in lowerings:
        return
    make_fallback(operation, warn=False, override_decomp=True)
    fallback = lowerings[operation]

    def lowering(written: Any, *args: Any, **kwargs: Any) -> Any:
        written.realize()
        V.graph.mark_buffer_mutated(written.get_name())
        return fallback(written, *args, **kwargs)

    lowerings[operation] = lowering


def takes_a_list(function: Callable[..., Any]) -> bool:
    """Returns True if a compiled function takes one list, which it empties (a mark of torch)."""
    return bool(getattr(function, "_boxed_call", False))


def has_cpp_compiler() -> bool:
    """Returns True if inductor has a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True
