"""`zbcompile.pipeline`, as a call and as a decorator."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, overload

import torch
from torch import nn

from zbcompile.api.pipeline import Pipeline
from zbcompile.distributed.process_group import device_of, find_ranks, is_alone
from zbcompile.errors import PipelineError
from zbcompile.options import GROUPS, OPTIONS, Options, document, options_from, options_in
from zbcompile.runtime.step_run import Engine
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.torch_private import warn_of_untried

Maker = Callable[..., nn.Module]
Keywords = ParamSpec("Keywords")


class Door(Protocol[Keywords]):
    """The types of `pipeline`, whose keywords are those of `Options`."""

    @overload
    def __call__(self, model: nn.Module, *args: Keywords.args, **options: Keywords.kwargs) -> Pipeline: ...
    @overload
    def __call__(
        self, *args: Keywords.args, **options: Keywords.kwargs
    ) -> Callable[[Maker], Callable[..., Pipeline]]: ...
    @overload
    def __call__(self, model: Maker, *args: Keywords.args, **options: Keywords.kwargs) -> Callable[..., Pipeline]: ...


def _with_keywords(kind: Callable[Keywords, Options]) -> Callable[[Callable[..., Any]], Door[Keywords]]:
    """Gives a function the keywords of `kind` in its types, signature and docstring, but not those in a group."""
    grouped = {option for group in GROUPS.values() for option in options_in(group).values()} - GROUPS.keys()
    names = [name for name in OPTIONS if name not in grouped]

    def decorate(function: Callable[..., Any]) -> Any:
        document(function, {name: name for name in names})
        of_kind = inspect.signature(kind).parameters
        first = inspect.signature(function).parameters["model"]
        function.__signature__ = inspect.Signature([first, *map(of_kind.__getitem__, names)])  # type: ignore[attr-defined]
        return function

    return decorate


@_with_keywords(Options)
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


def build_pipeline(options: Options, module: Any) -> Pipeline:
    """The pipeline for options that have been checked."""
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
