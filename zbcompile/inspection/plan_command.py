"""The plan command: a table and a picture of possible layouts, before any machine is reserved."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbcompile.batches.batch import Microbatch
from zbcompile.batches.batch_split import choose_cuts
from zbcompile.batches.example import Example
from zbcompile.cli.command_line import Command, flag_of, split_options
from zbcompile.cli.compile_arguments import (
    Plan,
    add_division,
    add_plan,
    example_of,
    quiet,
    require_division,
    with_options,
)
from zbcompile.cli.mesh_parts import DIMENSIONS, Labels, part_of, why_whole
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import lay_out_step, whole_of
from zbcompile.compiler.measure_nodes import measure_line
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.option import options_of
from zbcompile.planning.factorisations import SLOW, CapturedStep, PlanQuestion, PlanRow, factorisations, ranked
from zbcompile.progress import Say
from zbcompile.safe_files import write_whole
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.visualization.shapes import picture, shape
from zbcompile.schedules.visualization.svg import round_step
from zbcompile.schedules.visualization.units import SIZES
from zbcompile.tables import Figure, Table, to_data, to_text, written

WIDTH, HEIGHT, MARGIN = 640, 360, 70
NAMES = 220  # pixels beside the axes
STYLE = ".zb .best { fill: #2b8cd0 } .zb .other { fill: #999 } .zb .front { fill: none; stroke: #2b8cd0 }"


def plan_table(rows: Sequence[PlanRow], shown: int, title: str = "", every: bool = False) -> Table:
    """The best rows, the fastest of each division of the ranks, and the fastest others up to `shown`, none of them much
    slower than the first; or `every` row. A star marks the Pareto front of rate and memory."""
    fastest = {row.mesh: row for row in reversed(rows)}
    meant = [row for row in rows if row.rate >= rows[0].rate / SLOW]
    kept = [r for i, r in enumerate(meant) if r.best or i < shown or fastest[r.mesh] is r]
    kept, left = (list(rows), 0) if every else (kept, len(rows) - len(meant))
    takes, are = ("row takes", "is") if left == 1 else ("rows take", "are")
    note = f"{left} {takes} more than {SLOW:g} times as long as the fastest and {are} left out; --all shows every row."
    return Table("plan", title, [_figures(row, _unit(rows)) for row in kept], [note] * bool(left))


def _unit(rows: Sequence[PlanRow]) -> str:
    return "tokens/s" if any(row.tokens > 1 for row in rows) else "rows/s"


def _figures(row: PlanRow, rate: str) -> list[Figure]:
    layout = row.choice.layout
    return [
        Figure("best", "*" if row.best else ""),
        *(Figure(name, size) for name, size in zip(DIMENSIONS, row.mesh, strict=True)),
        Figure("placement", layout.placement),
        Figure("m", layout.microbatches),
        Figure("recompute", _written(layout.recompute)),
        Figure("vocab", str(layout.vocab)),
        Figure("step", row.seconds, "s", "step"),
        *([Figure("+-", row.spread * row.seconds, "s", "step")] if row.spread is not None else []),
        Figure(rate, row.rate, "1/s"),
        Figure("bubble", row.choice.bubble, "share", "step"),
        Figure("peak memory", row.peak, "B", "rank"),
    ]


def to_picture(rows: Sequence[PlanRow]) -> str:
    """Rate against memory as a self-contained SVG; what nothing beats in both is joined by a line.

    Points of that line are numbered and named; every point tells its row on hover.
    """
    most_bytes, most = max(row.peak for row in rows), max(row.rate for row in rows)
    low, left, wide, high = HEIGHT - MARGIN, MARGIN, WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = [(left + row.peak / most_bytes * wide, low - row.rate / most * high) for row in rows]
    front = " ".join(f"{x:.1f},{y:.1f}" for row, (x, y) in zip(rows, places, strict=True) if row.best)
    best = [(row, place) for row, place in zip(rows, places, strict=True) if row.best]
    unit, word = next((each, word) for each, word in SIZES if most_bytes >= each)
    shapes = [shape("path", "axis", d=f"M{left} {MARGIN}V{low}H{WIDTH - MARGIN}", fill="none")]
    shapes += [shape("text", text=_unit(rows), x=left, y=MARGIN - 10)]
    shapes += [shape("text", text="peak memory of a rank", x=left + wide, y=low + 34, text_anchor="end")]
    for amount, y in _ticks(most, high):
        shapes.append(shape("path", "axis", d=f"M{left - 4} {low - y:.1f}h4"))
        shapes.append(shape("text", text=f"{amount:,.12g}", x=left - 7, y=low - y + 4, text_anchor="end"))
    for amount, x in _ticks(most_bytes / unit, wide):
        shapes.append(shape("path", "axis", d=f"M{left + x:.1f} {low}v4"))
        shapes.append(shape("text", text=f"{amount:,.12g} {word}", x=left + x, y=low + 16, text_anchor="middle"))
    shapes.append(shape("polyline", "front", points=front))
    for row, (x, y) in zip(rows, places, strict=True):
        told = ", ".join(filter(None, map(written, _figures(row, _unit(rows)))))
        shapes.append(shape("circle", "best" if row.best else "other", title=told, cx=x, cy=y, r=4))
    for number, (row, (x, y)) in enumerate(best, 1):
        shapes.append(shape("text", text=str(number), x=x, y=y + (18 if number % 2 else -8), text_anchor="middle"))
        shapes.append(shape("text", text=f"{number}  {_name(row)}", x=WIDTH, y=MARGIN + 16 * number))
    return picture(WIDTH + NAMES, HEIGHT, shapes, STYLE)


def _name(row: PlanRow) -> str:
    """The name of a row: how the ranks are divided, the placement, the microbatches."""
    divided = " ".join(f"{name}{size}" for name, size in zip(DIMENSIONS, row.mesh, strict=True) if size > 1)
    return f"{divided} {row.choice.layout.placement} m{row.choice.layout.microbatches}".strip()


def _ticks(most: float, pixels: float) -> list[tuple[float, float]]:
    """Round amounts from 0 to `most`, and how far along an axis of `pixels` pixels each is."""
    step = round_step(most / 5)
    return [(number * step, number * step / most * pixels) for number in range(int(most / step) + 1)]


ASSUMED = (
    "Predicted from operations{fused} on {hardware}, with {messages}; memory is parameters, gradients, optimizer "
    "state, activations, also those of the pass that runs, and messages, without what kernels, the allocator and the "
    "sum of gradients over replicas take for themselves{divided}. Steps of many microbatches: the first ones, and the "
    "rest at their pace."
)
LINKED = "messages and sums of gradients over its links"
FREE = "messages and the exchange between replicas free"
EXAMPLES = """examples:
  python -m zbcompile.plan examples/targets.py:gpt --ranks 8
  python -m zbcompile.plan examples/targets.py:byte_llama --ranks 4 --mesh tp,pp
  python -m zbcompile.plan examples/targets.py:llama_70b --fake --ranks 64 --memory 80GiB --global-batch 512

TARGET is called without arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch. For rows
with tp > 1 it is called again with mesh=, a DeviceMesh, if it has a parameter of that name
(`mesh=None`), and returns the model on mesh["tp"]; else the model's own tp_plan is applied.
"""


@dataclass(frozen=True)
class PlanRequest(Plan):
    """The arguments of the command line."""

    global_batch: int | None
    fused: bool
    rows: int
    every: bool
    svg: Path | None
    json: bool
    dimensions: tuple[str, ...]
    zero: int
    reshard: bool

    def __post_init__(self) -> None:
        require_division(self.zero, self.reshard)


def _run(chosen: argparse.Namespace, say: Say) -> None:
    """Search and print; raises the project's errors."""
    request = PlanRequest(**split_options(chosen))
    request = with_options(request, **{"schedule": "auto", **request.given})
    ranks, schedule = request.options.ranks, request.options.schedule
    if not isinstance(schedule, str):
        raise PipelineError("--schedule: expected a name; the order in a file is for one number of ranks.")
    if ranks is None:
        raise PipelineError("--ranks is missing: how many are to be used altogether?")
    rows, impossible = _searched(request, schedule, ranks, say)
    if not rows:
        raise PipelineError(f"no plan for {ranks} ranks: {'; '.join(impossible)}")
    command = _command(request, schedule, rows[0])
    tables = [
        plan_table(rows, request.rows, _assumed(request), request.every),
        Table("impossible", notes=impossible),
        Table("command", "The fastest, as a command:", [[Figure("command", command)]], picture=f"  {command}"),
    ]
    print(json.dumps(to_data(tables), indent=1) if request.json else to_text(tables).rstrip("\n"))
    if request.svg is not None:
        write_whole(request.svg, to_picture(rows).encode())
        request.json or print(request.svg)


def _assumed(request: PlanRequest) -> str:
    hardware = request.options.hardware
    messages = LINKED if hardware and hardware.within else FREE
    fused, machine = " in fused kernels" * request.fused, hardware or "nominal speeds of the device"
    divided = f"; replicas divide what zero={request.zero} says" * bool(request.zero)
    return ASSUMED.format(fused=fused, hardware=machine, messages=messages, divided=divided)


def _searched(request: PlanRequest, schedule: str, ranks: int, say: Say) -> tuple[list[PlanRow], list[str]]:
    """The rows for every number of ranks that can share the matrices, and the reasons why others cannot."""
    whole, options = example_of(request), request.options
    how = schedule, options.microbatches, options.chunks, request.fused, request.zero, request.reshard
    question = PlanQuestion(options.choices, request.global_batch, request.dimensions, *how)
    task = question, ranks, options.search_seconds, say
    sizes = [tp for tp in range(2, ranks + 1) if ranks % tp == 0] if "tp" in request.dimensions else []
    why = why_whole(request, whole.model) if sizes else ""
    rows, impossible, best = factorisations(_captured(request, whole, say), *task)
    for tp in () if why else sizes:
        try:
            with part_of(request, whole.model, ranks, tp) as (part, labels):
                found, reasons, best = factorisations(_captured(request, part, say, tp, labels), *task, best)
        except Exception as error:  # also torch's, of a plan that does not fit the model: the other rows stand
            if request.debug:
                raise
            found, reasons = [], [f"tp={tp}: {next(iter(str(error).splitlines()), type(error).__name__)}"]
        rows, impossible = rows + found, impossible + reasons
    return ranked(rows), [*impossible, *([f"tp>1: {why}"] if why else [])]


def _captured(
    request: PlanRequest, example: Example, say: Say, tp: int = 1, labels: Labels | None = None
) -> CapturedStep:
    """The captured step of one of `tp` ranks."""
    say(f"capturing {type(example.model).__name__}{f' on one of {tp} ranks' * (tp > 1)}")
    microbatch, choices = one_microbatch(example), request.options.choices
    _, count = choose_cuts(microbatch.paths, microbatch.leaves, {})
    with quiet(request):
        laid_out = lay_out_step(example.model, microbatch, example.loss, choices, dimensions=labels)
        measured = measure_line(whole_of(laid_out).line) if choices.balance == "measured" else {}
    return CapturedStep(laid_out, count, _tokens(microbatch, count), measured, tp)


def _tokens(microbatch: Microbatch, rows: int) -> int:
    """How many tokens a row has: the longest row of whole numbers; 1 if there is none."""
    tensors = (each for each in microbatch.tensors.values() if each.dtype in (torch.int64, torch.int32))
    return max((each.numel() // rows for each in tensors if each.dim() > 1 and each.shape[0] == rows), default=1)


def _command(request: PlanRequest, schedule: str, row: PlanRow) -> str:
    """A program holds one pipeline of whole matrices; ranks that share them compile their parts themselves."""
    layout, (replicas, tensor, ranks) = row.choice.layout, row.mesh
    kept = [name for name in options_of(Choices) if name in request.given and name not in ("recompute", "vocab")]
    flags = [f"{flag_of(name)} {_written(request.given[name])}".rstrip() for name in kept]
    begin = f"python -m zbcompile.compile {request.target}{' --fake' * request.fake} --ranks {ranks}"
    divided = f" --zero {request.zero}{' --reshard' * request.reshard}" * (request.zero and replicas > 1)
    end = "--output program" if tensor == 1 else "--data FILE.py:NAME --steps N"
    if tensor > 1:
        begin = f"torchrun --nproc-per-node {replicas * tensor * ranks} -m zbcompile.run {request.target}"
        begin += f" --replicas {replicas} --tensor {tensor}{divided}"
    parts = [
        f"{begin} --schedule {schedule} --microbatches {layout.microbatches}",
        *([f"--chunks {layout.parsed.chunks}"] if find(schedule).free_chunks else []),
        f"--recompute {_written(layout.recompute)} --vocab {layout.vocab}",
        *flags,
        end,
    ]
    shared = f"a mesh with dp={replicas}, tp={tensor}, pp={ranks}"
    run = f"then torchrun --nproc-per-node {replicas * ranks} -m zbcompile.run program --replicas {replicas}{divided}"
    return " ".join(parts) + f"   # {shared if tensor > 1 else run}" * (replicas * tensor > 1)


def _written(value: Any) -> str:
    return "" if value is True else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive whole number")
    return int(text)


def _dimensions(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(DIMENSIONS) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected some of {','.join(DIMENSIONS)}")
    return found


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="package.module:name or path/file.py:name")
    parser.add_argument("--global-batch", metavar="N", type=_positive, help="rows of a step over all replicas")
    parser.add_argument(
        "--mesh",
        dest="dimensions",
        metavar="dp,tp,pp",
        type=_dimensions,
        default=DIMENSIONS,
        help="which may have several ranks",
    )
    parser.add_argument(
        "--fused", action="store_true", help="chains of elementwise operations take one kernel, as with inductor"
    )
    add_division(parser.add_argument)
    parser.add_argument("--rows", metavar="N", type=_positive, default=12, help="rows to print (default: %(default)s)")
    parser.add_argument("--all", dest="every", action="store_true", help="print every row, however slow")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw rate against memory")
    parser.add_argument("--json", action="store_true", help="the tables as JSON")
    add_plan(
        parser,
        without=("loss_reduction",),
        schedule="the name of the schedule that every row has (default: auto, which searches layouts and orders)",
        ranks="how many ranks altogether",
        microbatches="of a step of each replica (default: four a rank, or those of --global-batch in which it is best)",
    )


DESCRIPTION = (
    "Predict a training step for every way to divide ranks among replicas (dp), ranks that share every matrix (tp) and "
    "pipelines (pp)."
)
main = Command("plan", DESCRIPTION, EXAMPLES, _add_arguments, _run)
