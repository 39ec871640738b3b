"""The arguments that `zbcompile.inspect` and `zbcompile.compile` share."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.batches.example import Example
from zbcompile.cli.parsers import flag_of
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import Compile, CompiledExample, compile_example
from zbcompile.compiler.torch_logs import silenced, with_torchs_logs
from zbcompile.options import OPTIONS, PipelineOptions, is_searched
from zbcompile.passes.compile_step import PASSES, Observer, no_observer
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.torch_private import FakeTensorMode, replaced
from zbcompile.planning.auto import compile_auto
from zbcompile.planning.choose_schedule import choose_schedule
from zbcompile.prediction.memory_limit import compile_within_memory
from zbcompile.program.program import Program
from zbcompile.progress import Say
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.torch_private import apply_to, replace_tensors

RANKS = 2
FAKE = "h100-sxm"  # the device for predictions of fake models, unless --hardware names another


@dataclass(frozen=True)
class Plan:
    """The arguments that describe the program; `--help` explains them. `keywords` are the options
    among them. `fake` builds the model without memory; `debug` does not silence torch.
    """

    target: str
    keywords: Mapping[str, Any]
    fake: bool
    debug: bool

    @cached_property
    def options(self) -> PipelineOptions:
        """All options, those that were not given at their defaults. Raises PipelineError for a
        wrong value."""
        options = PipelineOptions(**self.keywords)
        return (
            replace(options, hardware=Hardware.find(FAKE))
            if self.fake and options.hardware is None
            else options
        )

    @property
    def changed(self) -> list[str]:
        """The options that differ from their defaults, as they are written on a command line."""
        flags = [name for name in self.keywords if getattr(self.options, name) != OPTIONS[name]]
        return [*map(flag_of, flags), *(["--fake"] * self.fake)]


def example_of(plan: Plan) -> Example:
    """Builds the model. Its output is printed on standard error, not in the report."""
    with (
        contextlib.redirect_stdout(sys.stderr),
        fake_models() if plan.fake else contextlib.nullcontext(),
    ):
        return load_example(plan.target)


def compiled(
    example: Example, schedule: Schedule, plan: Plan, say: Say, observe: Observer = no_observer
) -> CompiledExample:
    """Compile and `say` what passes have ended; `observe` is called after each. If it fails torch
    prints whole graphs, which only `--debug` shows."""

    def watch(name: str, artifact: Any) -> None:
        if name in ("export", "extract", "accumulate"):
            say(f"{name}: {PASSES[name]}")
        observe(name, artifact)

    with quiet(plan):
        return compile_example(
            example, schedule, plan.options.choices, watch, partial(_choose, plan.options, schedule)
        )


def _choose(options: PipelineOptions, schedule: Schedule, compile_: Compile) -> Program:
    """The program with the schedule and the recomputation that the options leave open."""
    if is_searched(options):
        return compile_auto(
            compile_, options.choices, schedule.ranks, schedule.microbatches, options.chunks
        )
    return compile_within_memory(partial(compile_, schedule), options.choices)


def schedule_of(plan: Plan, name: str | Schedule | None = None) -> Schedule:
    """The requested schedule, or the one called `wanted`, for the requested ranks and
    microbatches."""
    options = plan.options if name is None else replace(plan.options, schedule=name)
    default_ranks = RANKS if isinstance(options.schedule, str) else options.schedule.ranks
    return choose_schedule(options, options.ranks or default_ranks)


def quiet(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Hide everything that torch prints, unless with `--debug`."""
    return with_torchs_logs() if plan.debug else silenced()


@contextlib.contextmanager
def fake_models() -> Iterator[None]:
    """Context in which new tensors are fake, and `model.to(torch.bfloat16)` and `.half()` work on
    modules of them.

    torch (2.11-2.13) swaps the contents of fake parameters, which is impossible once anything
    refers to them weakly, as their initialisation does. Here a converted parameter replaces the
    former one, a tied one at every place.
    """
    # by the ids of a conversion and a parameter, which are kept so that their ids stay theirs
    converted: dict[tuple[int, int], tuple[Any, Tensor, nn.Parameter]] = {}

    def convert(
        module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        def new_parameter(parameter: nn.Parameter) -> nn.Parameter:
            key = id(fn), id(parameter)
            if key not in converted:
                with torch.no_grad():
                    new = nn.Parameter(fn(parameter), parameter.requires_grad)
                converted[key] = fn, parameter, new
            return converted[key][2]

        for child in module.children() if recurse else ():
            apply_to(child, fn)
        replace_tensors(module, new_parameter, fn)
        return module

    with replaced(nn.Module, "_apply", convert), FakeTensorMode():
        yield
