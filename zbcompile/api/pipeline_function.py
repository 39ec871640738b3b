"""The front door: `zbcompile.pipeline`, as a call and as a decorator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbcompile.api.pipeline import Pipeline
from zbcompile.backends.types import GraphCompiler
from zbcompile.distributed.mesh import MeshNames
from zbcompile.distributed.process_group import device_of, find_ranks, is_alone
from zbcompile.errors import PipelineError
from zbcompile.model.batch_split import Split
from zbcompile.model.materialize import Init
from zbcompile.model.placements import Placements
from zbcompile.options import OPTIONS, Memory, Options, Vocab, document, options_from
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import Barriers, Policy, Recompute
from zbcompile.passes.hardware.hardware import Hardware
from zbcompile.runtime.engines import Engine
from zbcompile.schedules.ir.schedule import Lowered, Schedule
from zbcompile.torch_private import warn_of_untried


class Keywords(TypedDict, total=False):
    """The keywords of `zbcompile.pipeline` with their types, for editors; `Options` describes each."""

    schedule: str | Schedule | Lowered
    microbatches: int | None
    ranks: int | None
    loss: LossFunction | None
    loss_reduction: str
    exact: bool
    recompute: Recompute | str | Sequence[Policy | str]
    weight_recompute: bool
    balance: str | Sequence[str]
    hardware: Hardware | str | None
    memory: int | float | str | Memory | None
    accumulate_dtype: torch.dtype | str | None
    vocab: Barriers | Vocab | None
    pairs: str
    channels: str | None
    split: Split | None
    chunks: int | None
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    mesh: DeviceMesh | None
    mesh_names: MeshNames | None
    placements: Placements | None
    seed: int
    timeout: float
    search_seconds: float
    max_shapes: int
    init: Init | None
    debug_nan: bool
    backend: str | GraphCompiler
    cuda_graphs: bool | str
    max_ctas: int | None
    compare_batches: int


Maker = Callable[..., nn.Module]


@overload
def pipeline(model: nn.Module, **options: Unpack[Keywords]) -> Pipeline: ...
@overload
def pipeline(**options: Unpack[Keywords]) -> Callable[[Maker], Callable[..., Pipeline]]: ...
@overload
def pipeline(model: Maker, **options: Unpack[Keywords]) -> Callable[..., Pipeline]: ...


def pipeline(model: Any = ..., **options: Any) -> Any:
    """Turn `model` into a pipeline, or decorate an nn.Module class or a function that returns a module.

    Args:
        {options}

    `memory=` also takes a `zbcompile.Memory`, which has more options, and `vocab=` a `zbcompile.Vocab`.

    Raises PipelineError, CompileError or ScheduleError with what to do, on every rank; FaultError if one rank failed
    in the middle of a step (docs/faults.md).

    >>> pipe = zbcompile.pipeline(model, schedule="zbv", microbatches=8, loss=loss_fn)      # doctest: +SKIP
    >>> loss = pipe.step(inputs, target=targets)                                            # doctest: +SKIP
    """
    build = functools.partial(build_pipeline, options_from(options))
    if isinstance(model, nn.Module):
        return build(model)
    return functools.partial(_decorate, build) if model is ... else _decorate(build, model)


document(pipeline, {name: name for name in Keywords.__annotations__})
_FIRST = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=...)
pipeline.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_FIRST]
    + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default, annotation=annotation)
        for name, annotation in Keywords.__annotations__.items()
    ]
)


def build_pipeline(options: Options, module: Any) -> Pipeline:
    """What `pipeline` does, with its options checked."""
    warn_of_untried(torch.__version__)
    if not isinstance(module, nn.Module):
        raise PipelineError(f"expected an nn.Module to pipeline, received {type(module).__name__}.")
    ranks = options.ranks
    if ranks is None and isinstance(options.schedule, Schedule) and is_alone(options.mesh):
        ranks = options.schedule.ranks
    found = find_ranks(lambda: device_of(module), ranks, options.mesh, options.timeout, options.mesh_names)
    pipe = Pipeline(module, options, Engine(found))
    if options.example is not None:
        args, kwargs = options.example
        pipe.compile(*args, **kwargs)
    return pipe


def _decorate(build: Callable[[Any], Pipeline], maker: Any) -> Callable[..., Pipeline]:
    if not (inspect.isfunction(maker) or (inspect.isclass(maker) and issubclass(maker, nn.Module))):
        raise PipelineError(
            "pipeline takes an nn.Module, or decorates an nn.Module class or a function that returns a module; "
            f"received {type(maker).__name__}."
        )

    @functools.wraps(maker, updated=())
    def make(*args: Any, **kwargs: Any) -> Pipeline:
        return build(maker(*args, **kwargs))

    return make
