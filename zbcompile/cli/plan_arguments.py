"""What a command line compiles: the arguments that `zbcompile.inspect` and `zbcompile.compile` share."""

import argparse
import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbcompile.cli.quiet import logging_disabled
from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import Inspected, compile_example
from zbcompile.errors import PipelineError
from zbcompile.frontend.options import Options, resolve_schedule
from zbcompile.model.example import Example
from zbcompile.passes.compile_options import BALANCES, Choices
from zbcompile.passes.manager.run_passes import Observer
from zbcompile.passes.torch_private import FakeTensorMode
from zbcompile.schedules import Schedule, load
from zbcompile.schedules.ir.schedule import Lowered

RANKS = 2
DEFAULTS: dict[str, Any] = {
    "schedule": None,
    "ranks": None,
    "microbatches": None,
    "chunks": None,
    "exact": False,
    "recompute": "hints",
    "vocab": "off",
    "vocab_logits": "auto",
    "weight_recompute": False,
    "balance": "flops",
    "boundary_bytes": None,
    "memory": None,
    "optimizer_state": 2.0,
    "accumulate_dtype": None,
    "loss_reduction": "mean",
    "fake": False,
}


@dataclass(frozen=True)
class Plan:
    """The arguments that say what is compiled; `--help` explains them. `debug` lets torch print what it likes."""

    target: str
    schedule: str | None
    ranks: int | None
    microbatches: int | None
    chunks: int | None
    exact: bool
    recompute: str
    vocab: str
    vocab_logits: str
    weight_recompute: bool
    balance: str
    boundary_bytes: int | None
    memory: int | None
    optimizer_state: float
    accumulate_dtype: str | None
    loss_reduction: str
    fake: bool
    debug: bool

    @property
    def schedule_name(self) -> str:
        return self.schedule or "zb-v"

    @property
    def changed(self) -> list[str]:
        """The options that are not at their defaults, as they are written on a command line."""
        given = [name for name, default in DEFAULTS.items() if getattr(self, name) != default]
        return [f"--{name.replace('_', '-')}" for name in given]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `Plan`."""
    group = parser.add_argument_group("what to compile")
    group.add_argument("--schedule", help="a name, or a .csv, .json or .txt file (default: zb-v)")
    group.add_argument("--ranks", type=int, help="how many ranks (default: 2, or those of a schedule file)")
    group.add_argument("--microbatches", type=int, help="default: the smallest count from 2 x stages on")
    group.add_argument("--chunks", type=int, help="stages per rank, for the interleaved schedules")
    group.add_argument("--exact", action="store_true", help="the graphs of exact=True")
    group.add_argument(
        "--recompute",
        metavar="none|hints|selective|full|BYTES",
        help="what B computes again (default: hints, the regions of torch.utils.checkpoint)",
    )
    group.add_argument(
        "--vocab",
        choices=("off", "auto", "1", "2"),
        help="shard the output layer over all ranks, with so many barriers (default: off)",
    )
    group.add_argument(
        "--vocab-logits",
        choices=("auto", "keep", "remake"),
        help="whether the logits of a shard wait for its weight gradient (default: as memory allows)",
    )
    group.add_argument("--weight-recompute", action="store_true", help="W computes cheap values again to save memory")
    group.add_argument(
        "--balance",
        metavar="flops|measured|parameters|NAME,NAME",
        help="what to make equal, or the modules to cut before (default: flops)",
    )
    group.add_argument("--boundary-bytes", type=int, help="the most bytes across a cut, per microbatch")
    group.add_argument("--memory", type=int, help="the most bytes on a rank")
    group.add_argument("--optimizer-state", type=float, help="bytes per parameter byte (default: 2)")
    group.add_argument(
        "--accumulate-dtype",
        choices=("float32", "float64"),
        help="sum gradients in this dtype where it is wider",
    )
    group.add_argument("--loss-reduction", choices=("mean", "sum"))
    group.add_argument("--fake", action="store_true", help="build the model without memory (CPU fake tensors)")
    parser.set_defaults(**DEFAULTS)


def example_of(plan: Plan) -> Example:
    """The model; what it prints while it is built is no part of the report."""
    with contextlib.redirect_stdout(sys.stderr), FakeTensorMode() if plan.fake else contextlib.nullcontext():
        return load_example(plan.target)


def compiled(example: Example, schedule: Schedule, plan: Plan, observe: Observer | None = None) -> Inspected:
    """Compile; where that fails torch prints whole graphs, which only `--debug` shows."""
    with quiet(plan):
        return compile_example(example, schedule, _choices(plan), observe)


def schedule_of(plan: Plan, wanted: str | Schedule) -> Schedule:
    """The schedule called `wanted`, or in the file `wanted`, for the ranks and microbatches that were asked for."""
    found = wanted
    if isinstance(wanted, str) and Path(wanted).suffix in (".csv", ".json", ".txt"):
        loaded = load(wanted)
        found = loaded.schedule if isinstance(loaded, Lowered) else loaded
    ranks = plan.ranks or (RANKS if isinstance(found, str) else found.ranks)
    options = Options(found, plan.microbatches, None, plan.loss_reduction, _choices(plan), None, plan.chunks, seed=0)
    return resolve_schedule(options, ranks, announce=False)


def _choices(plan: Plan) -> Choices:
    """What was asked for; `Options` checks it."""
    given = plan.recompute
    if plan.fake and plan.balance == "measured":
        raise PipelineError("--balance measured runs the model's operations for real; leave out --fake.")
    named = plan.balance not in BALANCES
    return Choices(
        exact=plan.exact,
        recompute=int(given) if given.isdecimal() else given,  # type: ignore[arg-type]
        balance=tuple(plan.balance.split(",")) if named else plan.balance,
        boundary_bytes=plan.boundary_bytes,
        memory=plan.memory,
        optimizer_state=plan.optimizer_state,
        accumulate_dtype=getattr(torch, plan.accumulate_dtype) if plan.accumulate_dtype else None,
        weight_recompute=plan.weight_recompute,
        vocab=int(plan.vocab) if plan.vocab.isdecimal() else plan.vocab,  # type: ignore[arg-type]
        vocab_logits=plan.vocab_logits,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def quiet(plan: Plan) -> Iterator[None]:
    """Nothing that torch prints is seen, unless for `--debug`."""
    if plan.debug:
        yield
        return
    streams = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with logging_disabled(logging.WARNING), streams[0], streams[1]:
        yield
