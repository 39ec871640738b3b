"""Every private PyTorch name that the runtime uses, as `passes/torch_private.py` has those of the
passes."""

import contextlib
import copy
import functools
import hashlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree  # torch.export's own pytree; torch.utils.pytree is newer

from zbcompile.passes.torch_private import hooks_of, is_in_place, make_fx, tensor_hooks

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


def profiler_is_on() -> bool:
    """Returns True if a profiler records in this thread. `record_function` costs microseconds even
    without one."""
    return torch.autograd._profiler_enabled()


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


def wrapper_like(cls: Any, like: torch.Tensor) -> Any:
    """Returns a tensor of a subclass that has no memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, dtype=like.dtype, device=like.device
    )  # type: ignore


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


def gloo_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a receive over gloo waits: as long as the group was given when it was made, also if
    its timeout was changed since. None if the group does not say (no public name;
    TORCH_DISTRIBUTED_DEBUG wraps groups).
    """
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def root_of(mesh: Any) -> Any:
    """The mesh that a mesh is a part of, or the mesh itself."""
    return mesh._get_root_mesh()


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without the hooks that torch runs around the step of every class (it marks
    the function in which it has wrapped the class's own)."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer except those of torch, and the entries of its state
    with names as keys."""
    torchs = {"_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}
    state = dict[Any, Any](optimizer.state)
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in {"state", "param_groups", *torchs}
    }
    return attributes | {
        f"state[{key!r}]": entry for key, entry in state.items() if isinstance(key, str)
    }


def gloo_link(store: dist.Store, rank: int, timeout: timedelta, size: int = 2) -> Any:
    """A gloo group that is not registered with torch.distributed. The class is public, its
    constructor not documented (torch.distributed._dist2 makes groups so)."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


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


# What inductor is told besides the user's own torch._inductor.config: eager's random numbers (its
# own generator draws others), no CUDA graphs (zbcompile captures its own) and no cache of its own
# (CompileCache is one).
INDUCTOR = {
    "fallback_random": True,
    "triton.cudagraphs": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "force_disable_caches": False,
}


def inductor_compile(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bytes:
    """Compiles a graph of ATen operations for fake inputs to bytes that `inductor_load` runs. Its
    libraries are in the folder of `inductor_files_in`.

    torch.compile and torch._inductor.compile would make additions into an input functional and copy
    the sums back, and their callables keep inputs alive until they return. So the graph is
    compiled by the function below them, `compile_fx_inner`. Its result leaves operations in place
    and frees inputs as they are used.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(INDUCTOR), torch.no_grad():
        _keep_in_place_operations()
        rules = {op: rule for op, rule in select_decomp_table().items() if not is_in_place(op)}
        lowered = make_fx(module, decomposition_table=rules)(*inputs)
        output = lowered.graph.output_node()
        values = output.args[0]
        output.meta["user_visible_output_idxs"] = list(range(len(values)))  # type: ignore[arg-type]
        output.meta["original_output_strides"] = [value.meta["val"].stride() for value in values]  # type: ignore[union-attr]
        compiled = copy.copy(compile_fx_inner(lowered, list(inputs), is_inference=True))
    compiled.prepare_for_serialization()
    return pickle.dumps(compiled)


def _keep_in_place_operations() -> None:
    """Makes inductor call these operations unchanged.

    Inductor needs a rule or a registered fallback for every operation. The fallback that it
    registers itself is refused if the environment variable CI is set.
    """
    from torch._inductor.lowering import lowerings, make_fallback

    aten = torch.ops.aten
    for operation in (aten.addmm_.default, aten.baddbmm_.default, aten.index_add_.default):
        if operation not in lowerings:
            make_fallback(operation, warn=False, override_decomp=True)


def inductor_load(content: bytes) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """Returns the function that `inductor_compile` compiled. It takes one list, which it empties.

    Inductor's cache does the same on a hit. Runs code from the folder of `inductor_files_in`.
    """
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    compiled = pickle.loads(content)
    constants = CompiledFxGraphConstants()
    with _no_headers():
        compiled.after_deserialization(constants)
    compiled.post_compile((), constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def _no_headers() -> Iterator[None]:
    """Inductor prepares torch's headers before it sees that a library is there already. To switch
    that off in its config would change the names of the libraries, which hash the compiler's
    command: all would be compiled again (`_precompile_header` returns what is included first, if
    anything)."""
    from torch._inductor import codecache

    prepare = codecache._precompile_header
    setattr(codecache, "_precompile_header", lambda *_, **__: "")  # noqa: B010  it takes what mypy does not
    try:
        yield
    finally:
        codecache._precompile_header = prepare


def takes_a_list(function: Callable[..., Any]) -> bool:
    """Returns True if a compiled function takes one list, which it empties (a mark of torch)."""
    return bool(getattr(function, "_boxed_call", False))


@contextlib.contextmanager
def inductor_files_in(folder: Path) -> Iterator[None]:
    """Let inductor read and write in `folder` alone (the environment variable for it is public,
    that it must forget what it loaded from elsewhere is not)."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with temporary_cache_dir(str(folder)):
        yield


def inductor_settings() -> str:
    """Everything besides the graph that enters the compiled code: torch's release, inductor's
    options and the switches of torch that it reads (the options have no public list)."""
    from torch._inductor import config

    with config.patch(INDUCTOR):
        options = sorted(config.save_config_portable().items())
    switches = [
        *(
            torch.__version__,
            torch.version.git_version,
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
        ),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32),
    ]
    return hashlib.sha256(repr([options, switches]).encode()).hexdigest()


def cpp_compiler() -> tuple[str, str]:
    """The C++ compiler that inductor uses, and its version; RuntimeError where there is none."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compiler = get_cpp_compiler()
    return compiler, get_compiler_version_info(compiler)


def vector_instructions(known: str | None) -> str:
    """The vector instructions that inductor compiles for. To find them it compiles and loads a
    library, which takes seconds; `known`, what an earlier run found on such a machine, is believed
    where the processor has them (`vec_isa_ok` skips the trial)."""
    from torch._inductor import config, cpu_vec_isa

    if known is not None:
        with config.patch({"cpp.vec_isa_ok": True}):
            if str(cpu_vec_isa.pick_vec_isa()) == known:
                return known
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return str(cpu_vec_isa.pick_vec_isa())
