"""The front door: `zbcompile.pipeline`, as a call and as a decorator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn

from zbcompile.backends.types import GraphCompiler
from zbcompile.distributed.process_group import device_of, find_ranks
from zbcompile.errors import PipelineError
from zbcompile.frontend.options import Options
from zbcompile.frontend.pipeline import Pipeline
from zbcompile.model.batch_split import Split
from zbcompile.model.materialize import Init
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import Choices, Recompute, Vocab, VocabLogits
from zbcompile.runtime.make_engine import make_engine
from zbcompile.schedules.ir.schedule import Schedule


@overload
def pipeline(model: nn.Module, **options: Any) -> Pipeline: ...
@overload
def pipeline(model: None = None, **options: Any) -> Callable[[Callable[..., nn.Module]], Callable[..., Pipeline]]: ...
@overload
def pipeline(model: Callable[..., nn.Module], **options: Any) -> Callable[..., Pipeline]: ...


def pipeline(  # type: ignore[misc]  # the overloads differ in `model` alone and leave the keywords to this list
    model: Any = None,
    *,
    schedule: str | Schedule = "zb-v",
    microbatches: int | None = None,
    ranks: int | None = None,
    loss: LossFunction | None = None,
    loss_reduction: str = "mean",
    exact: bool = False,
    recompute: Recompute = "hints",
    weight_recompute: bool = False,
    balance: str | Sequence[str] = "flops",
    boundary_bytes: int | None = None,
    memory: int | None = None,
    optimizer_state: float = 2.0,
    accumulate_dtype: torch.dtype | None = None,
    vocab: Vocab = "off",
    vocab_logits: VocabLogits = "auto",
    split: Split | None = None,
    chunks: int | None = None,
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    mesh: Any = None,
    seed: int = 0,
    timeout: float = 300.0,
    max_shapes: int = 8,
    init: Init | None = None,
    debug_nan: bool = False,
    backend: str | GraphCompiler = "fx",
    cuda_graphs: bool = False,
) -> Any:
    """Turn `model` into a pipeline, or decorate an nn.Module class or a function that returns a module.

    Args:
        schedule: a name in any spelling (`zbcompile.schedules.names()`) or a `Schedule`.
        microbatches: how many equal parts each batch is split into; default: the smallest count from 2 x stages on.
        ranks: without torchrun, how many ranks to run inside this process. Under torchrun the process group decides.
        loss: `loss(output, target)`; without it, forward returns the loss, or something with a `.loss`.
        loss_reduction: "mean" (the step's loss is the mean over microbatches) or "sum". A mean of means is not the mean
            over the batch when microbatches count differently (ignore_index); use "sum" with a divisor of your own
            there.
        exact: gradients bitwise equal to eager gradient accumulation (fp32); else weight gradients are added inside the
            GEMM, equal within 1e-6 of the largest gradient entry.
        recompute: what each backward computes again instead of keeping it from the forward (docs/memory.md). "hints":
            `torch.utils.checkpoint` regions; "none": nothing, not even these; "selective": also what is cheap
            (everything but products with parameters); "full": whatever can be, so that a stage keeps its inputs; an
            int: as little as possible, such that a stage keeps at most so many bytes per microbatch between its F and
            B. Gradients keep their bits; random numbers are not drawn again.
        weight_recompute: W computes cheap values again (activations, norms) where that lowers the bytes that wait
            between F and B plus those between B and W (docs/split.md). Gradients keep their bits.
        balance: by what the stages are made equal (docs/partitioning.md): "flops" (with bytes, at nominal speeds),
            "measured" (every kind of operation is run on this device), "parameters"; or the cuts themselves, as names
            of modules (cut before it) or of operations as inspect prints them (cut after it).
        boundary_bytes: the most bytes that may cross a cut per microbatch.
        memory: the most bytes that a rank may hold: parameters, gradients, optimizer state, activations in flight.
        optimizer_state: for `memory`, bytes of optimizer state per byte of trained parameter; Adam has 2.
        accumulate_dtype: the dtype in which a step sums the gradients of its microbatches; each parameter takes the
            wider of this and its own. The sum is rounded into `.grad` once, at the end of the step. Default: float32
            for bfloat16 and float16 parameters, with `exact=True` the parameter's own, as in eager mode.
        vocab: whether the output layer and its loss are sharded over all ranks by rows of the vocabulary
            (docs/vocabulary.md): "off"; 1 or 2 barriers between the last stage's forward and backward (one takes less
            memory); "auto": 1 where there is an output layer that can be sharded and the predicted step is at least 5 %
            shorter than with the layers redistributed around it, else off. The embedding is sharded by the same rows.
            Gradients are equal within 2e-6 (fp32).
        vocab_logits: whether the logits of a shard wait for its weight gradient ("keep") or are made again ("remake":
            a third more FLOPs of the output layer, and nothing of the size of the vocabulary waits); "auto": kept while
            those of a microbatch take at most 256 MiB and `memory` allows it.
        split: how inputs are split into microbatches, by path or keyword name: False (whole in every microbatch), True
            (along dimension 0) or the dimension, each by its own length. Tensors that are not named agree about
            dimension 0, the batch; those without dimensions or with one row go whole into every microbatch.
        chunks: stages per rank, for the interleaved schedules.
        example: `(args, kwargs)` of one batch (`target` among the keywords); compiles at once.
        mesh: a DeviceMesh with a "pp" dimension and, for data parallelism, a "dp" dimension: every replica of the
            pipeline then takes a batch of its own, and loss and gradients are those of the concatenated batch (the
            mean or the sum over all of it, by `loss_reduction`).
        seed: enters `zbcompile.microbatch_seed`.
        timeout: seconds that a rank waits for another one, in a step, a compilation or at the start, before all ranks
            end with an error that names it. A rank that fails or dies ends the others within 5 seconds.
        max_shapes: how many programs are kept. Every new shape of batch compiles one, with a notice; beyond this many
            the one not used for longest is dropped. Parameters and their places are the same for all.
        init: `init(name, tensor)` fills a parameter or buffer in place, for a model built on the meta device: after the
            first compilation each rank makes its own share real and nothing else. Without it `load_state_dict` fills
            the share before the first step.
        debug_nan: stop at the first operation of a step or of `eval` that makes a NaN or an infinity, and name its
            stage, pass, microbatch and line, or the input, parameter or buffer that holds a NaN (slow; the graphs run
            as they are, whatever the backend). ZBCOMPILE_DEBUG_NAN=1 does the same.
        backend: what runs the graphs (docs/backends.md). "fx": each operation as it is; "inductor": compiled by torch's
            inductor, once per distinct graph and machine, gradients equal within 2e-6 of the largest entry (fp32); or a
            function `backend(graph_module, example_inputs)` that returns what is called in place of the graph.
        cuda_graphs: record every pass as a CUDA graph and replay it (docs/backends.md). Takes memory for the copies of
            what goes in and out, and gradients that stay in place: `optimizer.zero_grad(set_to_none=False)`.

    Raises PipelineError, CompileError or ScheduleError with what to do, on every rank; FaultError where one rank
    failed in the middle of a step (docs/faults.md).

    >>> pipe = zbcompile.pipeline(model, schedule="zbv", microbatches=8, loss=loss_fn)      # doctest: +SKIP
    >>> loss = pipe.step(inputs, target=targets)                                            # doctest: +SKIP
    """
    cuts = balance if isinstance(balance, str) else tuple(balance)
    choices = Choices(
        *(exact, recompute, cuts, boundary_bytes, memory, optimizer_state, accumulate_dtype, weight_recompute),
        *(vocab, vocab_logits),
    )
    options = Options(
        schedule,
        microbatches,
        loss,
        loss_reduction,
        choices,
        split,
        chunks,
        seed,
        timeout,
        max_shapes,
        init,
        debug_nan,
        backend,
        cuda_graphs,
    )

    def build(module: Any) -> Pipeline:
        if not isinstance(module, nn.Module):
            raise PipelineError(f"expected an nn.Module to pipeline, received {type(module).__name__}.")
        found = find_ranks(lambda: device_of(module), ranks, mesh, timeout)
        pipe = Pipeline(module, options, make_engine(found))
        if example is not None:
            args, kwargs = example
            pipe.compile(*args, **kwargs)
        return pipe

    if isinstance(model, nn.Module):
        return build(model)
    if model is None:
        return lambda maker: _decorate(maker, build)
    return _decorate(model, build)


def _decorate(maker: Any, build: Callable[[Any], Pipeline]) -> Callable[..., Pipeline]:
    if not (inspect.isfunction(maker) or (inspect.isclass(maker) and issubclass(maker, nn.Module))):
        raise PipelineError(
            "pipeline decorates an nn.Module class or a function that returns a module; received "
            f"{type(maker).__name__}."
        )

    @functools.wraps(maker, updated=())
    def make(*args: Any, **kwargs: Any) -> Pipeline:
        return build(maker(*args, **kwargs))

    return make
