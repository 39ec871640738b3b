"""What a user may ask of a pipeline, checked before anything is compiled."""

from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.backends.backend import check_backend
from zbcompile.backends.types import GraphCompiler
from zbcompile.errors import PipelineError
from zbcompile.model.batch_split import Split
from zbcompile.model.materialize import Init
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import BALANCES, RECOMPUTE_POLICIES, VOCAB_LOGITS, VOCABS, Choices
from zbcompile.schedules.generators.registry import build, smallest_microbatches
from zbcompile.schedules.ir.files import load
from zbcompile.schedules.ir.schedule import Schedule


@dataclass(frozen=True)
class Options:
    """The keywords of `zbcompile.pipeline`; see there."""

    schedule: str | Schedule
    microbatches: int | None
    loss: LossFunction | None
    loss_reduction: str
    choices: Choices
    split: Split | None
    chunks: int | None
    seed: int
    timeout: float = 300.0
    max_shapes: int = 8
    init: Init | None = None
    debug_nan: bool = False
    backend: str | GraphCompiler = "fx"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise PipelineError(f'loss_reduction={self.loss_reduction!r}; expected "mean" or "sum".')
        if self.microbatches is not None and (not isinstance(self.microbatches, int) or self.microbatches < 1):
            raise PipelineError(f"microbatches={self.microbatches!r}; expected a positive number of microbatches.")
        if not isinstance(self.max_shapes, int) or self.max_shapes < 1:
            raise PipelineError(f"max_shapes={self.max_shapes!r}; expected a positive number of programs to keep.")
        if not self.timeout > 0:
            raise PipelineError(f"timeout={self.timeout!r}; expected a positive number of seconds.")
        if self.loss is not None and not callable(self.loss):
            raise PipelineError(f"loss= is a {type(self.loss).__name__}; expected a function loss(output, target).")
        _check_recompute(self.choices.recompute)
        if not isinstance(self.choices.weight_recompute, bool):
            raise PipelineError(f"weight_recompute={self.choices.weight_recompute!r}; expected True or False.")
        if self.choices.vocab not in VOCABS or isinstance(self.choices.vocab, bool):
            raise PipelineError(f'vocab={self.choices.vocab!r}; expected "off", "auto", 1 or 2 (barriers).')
        if self.choices.vocab_logits not in VOCAB_LOGITS:
            raise PipelineError(f'vocab_logits={self.choices.vocab_logits!r}; expected "auto", "keep" or "remake".')
        check_backend(self.backend, self.choices.exact)
        _check_cuts(self.choices)
        _check_dtype(self.choices.accumulate_dtype)


def _check_recompute(given: Any) -> None:
    bytes_ = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    if not (bytes_ or given in RECOMPUTE_POLICIES):
        names = ", ".join(f'"{name}"' for name in RECOMPUTE_POLICIES)
        raise PipelineError(f"recompute={given!r}; expected {names}, or a number of bytes per microbatch and stage.")


def _check_cuts(choices: Choices) -> None:
    balance = choices.balance
    if isinstance(balance, str) and balance not in BALANCES:
        names = ", ".join(f'"{name}"' for name in BALANCES)
        raise PipelineError(f"balance={balance!r}; expected {names}, or a list with the names of all cuts.")
    if not all(isinstance(name, str) for name in balance):
        raise PipelineError(f"balance={list(balance)!r}; expected names of modules, such as 'blocks.2'.")
    for name, value in (("boundary_bytes", choices.boundary_bytes), ("memory", choices.memory)):
        if value is not None and not value > 0:
            raise PipelineError(f"{name}={value!r}; expected a positive number of bytes.")
    if not choices.optimizer_state >= 0:
        raise PipelineError(f"optimizer_state={choices.optimizer_state!r}; expected bytes per byte of parameter.")


def _check_dtype(given: Any) -> None:
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise PipelineError(f"accumulate_dtype={given!r}; expected None or a floating-point dtype: torch.float32.")


def resolve_schedule(options: Options, ranks: int, announce: bool) -> Schedule:
    """The schedule for `ranks` ranks. Raises ScheduleError or PipelineError for one that does not fit them."""
    if isinstance(options.schedule, str) and not options.schedule.endswith(".csv"):
        return _named(options, options.schedule, ranks, announce)
    schedule: Any = options.schedule
    if isinstance(schedule, str):
        schedule = load(schedule)
    if not isinstance(schedule, Schedule):
        raise PipelineError(f"schedule= is a {type(schedule).__name__}; expected a name, a CSV file or a Schedule.")
    if schedule.ranks != ranks:
        raise PipelineError(
            f"the schedule {schedule.name} is for {schedule.ranks} ranks ({schedule.stages} stages), but there are "
            f"{ranks}. Build it with ranks={ranks}, or start {schedule.ranks} ranks."
        )
    if options.microbatches not in (None, schedule.microbatches):
        raise PipelineError(
            f"microbatches={options.microbatches}, but the schedule {schedule.name} is for {schedule.microbatches}."
        )
    return schedule


def _named(options: Options, name: str, ranks: int, announce: bool) -> Schedule:
    if options.microbatches is not None:
        return build(name, ranks, options.microbatches, chunks=options.chunks)
    stages = build(name, ranks, smallest_microbatches(name, ranks), chunks=options.chunks).stages
    count = smallest_microbatches(name, ranks, at_least=2 * stages, chunks=options.chunks)
    if announce:
        print(
            f"zbcompile: microbatches= not given; using {count}, the smallest {name} admits from 2 x {stages} stages "
            "on."
        )
    return build(name, ranks, count, chunks=options.chunks)
