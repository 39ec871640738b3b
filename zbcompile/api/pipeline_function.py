"""`zbcompile.pipeline`, as a call and as a decorator."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.process_group import device_of, find_ranks, is_alone
from zbcompile.engine.step import Engine
from zbcompile.errors import PipelineError
from zbcompile.model.materialize import Init
from zbcompile.options import PipelineOptions, require_known
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import Barriers, Policy
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.schedules import Schedule
from zbcompile.torch_private import warn_of_untried

Maker = Callable[..., nn.Module]


@overload
def pipeline(model: nn.Module, **options: Any) -> Pipeline: ...
@overload
def pipeline(**options: Any) -> Callable[[Maker], Callable[..., Pipeline]]: ...
@overload
def pipeline(model: Maker, **options: Any) -> Callable[..., Pipeline]: ...
def pipeline(
    model: Any = ...,
    *,
    schedule: str | Schedule = "zb-v",
    microbatches: int | None = None,
    ranks: int | None = None,
    loss: LossFunction | None = None,
    loss_reduction: str = "mean",
    chunks: int | None = None,
    mesh: DeviceMesh | None = None,
    exact: bool = False,
    recompute: str | float | Sequence[Policy] = "hints",
    memory: float | str | None = None,
    optimizer_state: float = 2.0,
    vocab: Barriers | None = None,
    balance: str | Sequence[str] = "flops",
    hardware: Hardware | str | None = None,
    backend: str | Callable[..., Any] = "fx",
    cuda_graphs: bool = False,
    split: Mapping[str, bool | int] | None = None,
    static_inputs: Sequence[str] = (),
    placements: Mapping[str, Mapping[str, str]] | None = None,
    accumulate_dtype: torch.dtype | str | None = None,
    pairs: str = "auto",
    seed: int = 0,
    operators: Sequence[str] = (),
    init: Init | None = None,
    timeout: float = 300.0,
    max_shapes: int = 8,
    debug_nan: bool = False,
    warm_up: bool = True,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    **unknown: Any,
) -> Any:
    """Turns `model` into a pipeline, or decorates an nn.Module class or a function that returns a
    module.

    Args:
        schedule: A name in any spelling (`zbcompile.schedules.names()`), a .csv or .json file, or a
            `Schedule`, whose messages, if it has some, are replaced. Weight gradients accumulate in
            its order of W. "auto" takes the name whose predicted step is the shortest, when the
            first batch is there (docs/schedules.md).
        microbatches: How many equal parts each batch is split into. Default: the smallest count
            from 2 x stages on that the schedule admits and that divides the first batch, else the
            largest below.
        ranks: Without torchrun, how many ranks to run inside this process. Under torchrun the
            process group decides. Default: those of a `Schedule` or schedule file, else one.
        loss: `loss(output, target)`. Without it, forward returns the loss, or something with a
            `.loss`.
        loss_reduction: Whether the loss of a step is the "mean" of its microbatches' losses or
            their "sum". A mean of means is not the mean over the batch if microbatches count
            differently (ignore_index); use "sum" with a global divisor then.
        chunks: Stages per rank, for the interleaved schedules.
        mesh: A DeviceMesh of all processes with any of the dimensions "pp" (the pipeline's ranks),
            "dp" (replicas), "tp" (tensor parallelism), "cp" (context parallelism) and "ep"
            (experts), docs/composition.md. Ranks along "dp" and "ep" pass batches of their own,
            along "pp", "tp" and "cp" the same one. Loss and gradients are those of the concatenated
            batch (the mean or the sum over all of it and over "cp", by `loss_reduction`).
        exact: Gradients bitwise equal to eager gradient accumulation (fp32). Else weight gradients
            are added inside the GEMM, equal within 1e-6 of the largest gradient entry.
        recompute: What each backward recomputes instead of keeping it from the forward
            (docs/memory.md). "hints": `torch.utils.checkpoint` regions; "off": nothing, not even
            these; "selective": also what is cheap (everything but products with parameters);
            "full": whatever can be, so that a stage keeps its inputs; bytes (an int, or a text such
            as "64MiB"): as little as possible, such that a stage keeps at most that many per
            microbatch between its F and B; a float from 0 to 1: the same with that share of what it
            would keep without, or with what it has to keep if that is more. A list has an entry for
            each stage. Gradients keep their bits; random numbers are not drawn again.
        memory: The most bytes that a rank may hold. Parameters, gradients, optimizer state,
            activations in flight, messages; a number, or a text ("80GiB"; a GB is 1e9). Where
            `recompute=` is not given, the first of "hints", "selective" and "full" is taken with
            which the compiled stages fit.
        optimizer_state: Bytes of optimizer state per byte of trained parameter, for the limit of
            memory. Adam has 2. Of parameters in half precision: per byte of their float32 masters,
            which are counted as well.
        vocab: Whether the output layer and its loss are sharded over all ranks by rows of the
            vocabulary (docs/partitioning.md). "off"; 1 or 2 barriers between the last stage's
            forward and backward (one takes less memory); "auto": 1 if there is an output layer that
            can be sharded and the predicted step is at least 5 % shorter than with the whole output
            layer and balanced stages, else off. The embedding is sharded by the same rows.
            Gradients are within 1e-6 of the largest entry (fp32). Default: off; with
            `schedule="auto"` it is "auto".
        balance: How the model is cut (docs/partitioning.md). "flops": into stages of equal FLOPs
            (with bytes, at nominal speeds); or the cuts themselves, as names of modules (cut before
            it) or of operations as inspect prints them (cut after it).
        hardware: What the model is cut and its step predicted for (docs/inspect.md). A profile by
            its name, a TOML file with its figures, or a `zbcompile.Hardware`. Default: nominal
            speeds of the device.
        backend: What runs the graphs (docs/backends.md). "fx": operations, unchanged; "inductor":
            compiled by torch's inductor, once per distinct graph and machine, gradients equal
            within 2e-6 of the largest entry (fp32); or a function `backend(graph_module,
            example_inputs)` that returns what is called in place of the graph.
        cuda_graphs: True: record every pass as a CUDA graph and replay it (docs/backends.md). Takes
            memory for the copies of what goes in and out, and gradients that stay in place:
            `optimizer.zero_grad(set_to_none=False)`.
        split: How inputs are split into microbatches, by path or keyword name. False (whole in
            every microbatch), True (along dimension 0) or the dimension, each by its own length.
            Tensors that are not named agree about dimension 0, the batch; those without dimensions
            or with one row go whole into every microbatch.
        static_inputs: Inputs whose values forward reads in Python (`.tolist()`, an `if`), by path
            or keyword name. They are part of the key: every new value compiles a program, and
            `max_shapes` programs are kept.
        placements: What plain parameters are along "tp", "cp" and "ep" of `mesh`, by patterns of
            their names: {"*.experts.*": {"ep": "shard"}, "*norm*": {"tp": "partial"}}. "replicate":
            equal values, and every rank computes the whole gradient (the default along "tp").
            "partial": equal values, and the gradient is the sum over the ranks, formed once per
            step (the default along "cp" and "ep"). "shard": every rank has another part. The first
            step compares what is said to be equal. DTensors say it themselves.
        accumulate_dtype: The dtype in which a step sums the gradients of its microbatches. Each
            parameter takes the wider of this and its own; the sum is rounded into `.grad` once, at
            the end of the step. Default: float32 for bfloat16 and float16 parameters, with
            `exact=True` the parameter's own, as in eager mode.
        pairs: "auto": where stages exchange tensors in the middle of a microbatch, a B or F is
            paired with a W that hides the exchange, if neither the simulated step nor the memory
            suffers (docs/composition.md); "given": no pairs but those of the schedule.
        seed: Enters `zbcompile.microbatch_seed`.
        operators: Operators of other libraries, such as "mylibrary::scale", that the graphs of a
            saved program may call (`zbcompile.load`). Operators that forward calls itself need no
            entry.
        init: `init(name, tensor)` fills a parameter or buffer in place, for a model built on the
            meta device. After the first compilation each rank materialises its own share and
            nothing else. Without it `load_state_dict` fills the share before the first step.
        timeout: Seconds that a rank waits for another one before all ranks end with an error that
            names it. In a step, a compilation or at the start; a rank that fails or dies ends the
            other ranks within 5 seconds.
        max_shapes: How many programs are kept. Every new shape of batch compiles one, with a
            notice; beyond this many the least recently used is evicted. Parameters and their places
            are the same for all.
        debug_nan: Stop at the first operation of a step or of `eval` that makes a NaN or an
            infinity. Names its stage, pass, microbatch and line, or the input, parameter or buffer
            that holds a NaN (slow; the graphs run as they are, whatever the backend).
        warm_up: Run every pass of this rank once on zeros when a program is compiled, so that all
            ranks build their kernels in parallel. Random state, buffers and gradients stay equal.
        example: `(args, kwargs)` of one batch (`target` among the keywords). Compiles immediately.

    Raises PipelineError, CompileError or ScheduleError with what to do, on every rank; FaultError
    if one rank failed in the middle of a step (docs/faults.md); TypeError for a keyword that is no
    option.

    >>> pipe = zbcompile.pipeline(model, schedule="zbv", loss=loss_fn)  # doctest: +SKIP
    >>> loss = pipe.step(inputs, target=targets)  # doctest: +SKIP
    """
    options = {name: value for name, value in locals().items() if name not in ("model", "unknown")}
    require_known(unknown)
    build = functools.partial(build_pipeline, PipelineOptions(**options))
    if isinstance(model, nn.Module):
        return build(model)
    return functools.partial(_decorate, build) if model is ... else _decorate(build, model)


def build_pipeline(options: PipelineOptions, module: Any) -> Pipeline:
    """The pipeline for options that have been checked."""
    warn_of_untried(torch.__version__)
    if not isinstance(module, nn.Module):
        raise PipelineError(f"expected an nn.Module to pipeline, received {type(module).__name__}.")
    ranks = options.ranks
    if ranks is None and isinstance(options.schedule, Schedule) and is_alone(options.mesh):
        ranks = options.schedule.ranks
    process_ranks = find_ranks(lambda: device_of(module), ranks, options.mesh, options.timeout)
    pipe = Pipeline(module, options, Engine(process_ranks))
    if options.example is not None:
        args, kwargs = options.example
        pipe.compile(*args, **kwargs)
    return pipe


def _decorate(build: Callable[[Any], Pipeline], maker: Any) -> Callable[..., Pipeline]:
    if not (inspect.isfunction(maker) or (inspect.isclass(maker) and issubclass(maker, nn.Module))):
        raise PipelineError(
            "pipeline takes an nn.Module, or decorates an nn.Module class or a function that"
            f" returns a module; received {type(maker).__name__}."
        )

    @functools.wraps(maker, updated=())
    def make(*args: Any, **kwargs: Any) -> Pipeline:
        return build(maker(*args, **kwargs))

    return make
