"""The subject of a command line: the arguments that `zbcompile.inspect` and `zbcompile.compile` share."""

import argparse
import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from zbcompile.cli.option_flags import add_flags, flag_of
from zbcompile.cli.quiet import logging_disabled
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import Inspected, compile_example
from zbcompile.errors import PipelineError
from zbcompile.frontend.choose_schedule import choose_schedule
from zbcompile.frontend.options import OPTIONS, Options
from zbcompile.model.example import Example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.option import options_of
from zbcompile.passes.pass_list.run_passes import Observer
from zbcompile.passes.torch_private import FakeTensorMode
from zbcompile.schedules import Schedule

RANKS = 2
FLAGS = ("schedule", "ranks", "microbatches", "chunks", *options_of(Choices), "loss_reduction")


@dataclass(frozen=True)
class Plan:
    """The arguments that say what is compiled; `--help` explains them. `given` are the options among them, `fake`
    builds the model without memory, `debug` does not silence torch."""

    target: str
    given: Mapping[str, Any]
    fake: bool
    debug: bool

    @cached_property
    def options(self) -> Options:
        """All options, those that were not given at their defaults. Raises PipelineError for a wrong value."""
        options = Options(**self.given)
        if self.fake and options.balance == "measured":
            raise PipelineError("--balance measured runs the model's operations for real; leave out --fake.")
        return options

    @property
    def changed(self) -> list[str]:
        """The options that differ from their defaults, as they are written on a command line."""
        given = [name for name in self.given if getattr(self.options, name) != OPTIONS[name].default]
        return [*map(flag_of, given), *(["--fake"] if self.fake else [])]


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def with_options(plan: AnyPlan, **options: Any) -> AnyPlan:
    """The same arguments with other options."""
    return replace(plan, given={**plan.given, **options})


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `Plan`."""
    group = parser.add_argument_group("what to compile")
    add_flags(group, FLAGS, ranks="how many ranks (default: 2, or those of a schedule file)")
    group.add_argument("--fake", action="store_true", help="build the model of fake tensors (CPU, no memory)")


def example_of(plan: Plan) -> Example:
    """Build the model; what it prints meanwhile goes to standard error, not into the report."""
    with contextlib.redirect_stdout(sys.stderr), FakeTensorMode() if plan.fake else contextlib.nullcontext():
        return load_example(plan.target)


def compiled(example: Example, schedule: Schedule, plan: Plan, observe: Observer | None = None) -> Inspected:
    """Compile; if that fails torch prints whole graphs, which only `--debug` shows."""
    with quiet(plan):
        return compile_example(example, schedule, plan.options.choices, observe)


def schedule_of(plan: Plan, wanted: str | Schedule | None = None) -> Schedule:
    """The schedule that was asked for, or the one called `wanted`, for the ranks and microbatches that were."""
    options = plan.options if wanted is None else replace(plan.options, schedule=wanted)
    own = RANKS if isinstance(options.schedule, str) else options.schedule.ranks
    return choose_schedule(options, options.ranks or own)


@contextlib.contextmanager
def quiet(plan: Plan) -> Iterator[None]:
    """Hide everything that torch prints, unless with `--debug`."""
    if plan.debug:
        yield
        return
    streams = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with logging_disabled(logging.WARNING), streams[0], streams[1]:
        yield
