"""`python -m zbcompile.plan TARGET --ranks N`: the table, and a picture, to look at before asking
for machines."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from zbcompile.amounts import format_share, format_time
from zbcompile.cli.command_line import exit_status, flag_of, split_options
from zbcompile.cli.compile_arguments import Plan, add_plan, announcer, example_of, quiet
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import draw_step, whole_of
from zbcompile.compiler.measure_nodes import measure_line
from zbcompile.errors import PipelineError
from zbcompile.inspection.report import table, wrap
from zbcompile.model.batch import Microbatch
from zbcompile.model.batch_split import choose_cuts
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.option import options_of
from zbcompile.passes.stage.print_python import format_bytes
from zbcompile.planning.factorisations import Row, factorisations
from zbcompile.safe_files import write_whole

WIDTH, HEIGHT, MARGIN = 640, 360, 70
STYLE = (
    "text { font: 11px sans-serif; fill: #111 } .best { fill: #0072b2 } .other { fill: #bbb } "
    ".front { fill: none; stroke: #0072b2 } .axis { stroke: #999 } rect { fill: #fff }"
)


def format_plan(rows: Sequence[Row], shown: int) -> str:
    """The best rows, the fastest of each division of the ranks, and the fastest others up to `shown`; a star marks the
    Pareto front of rate and memory."""
    fastest = {row.ranks: row for row in reversed(rows)}
    kept = [row for index, row in enumerate(rows) if row.best or index < shown or fastest[row.ranks] is row]
    headers = ["", "dp", "pp", "placement", "m", "recompute", "vocab", "step", _unit(rows), "bubble", "peak memory"]
    return table([_cells(row) for row in kept], headers, left=("", "placement", "recompute"))


def _unit(rows: Sequence[Row]) -> str:
    return "tokens/s" if any(row.tokens > 1 for row in rows) else "rows/s"


def _cells(row: Row) -> list[str]:
    layout = row.layout
    return [
        "*" if row.best else "",
        str(row.replicas),
        str(row.ranks),
        layout.placement,
        str(layout.microbatches),
        str(layout.choices.recompute),
        str(layout.choices.vocab),
        format_time(row.seconds, "s"),
        f"{row.rate:,.0f}" if row.rate >= 1000 else f"{row.rate:.3g}",
        format_share(layout.bubble),
        format_bytes(row.peak),
    ]


def to_picture(rows: Sequence[Row]) -> str:
    """Rate against memory as a self-contained SVG; what nothing beats in both is joined by a line.

    Every point tells its row on hover.
    """
    most_bytes, most = max(row.peak for row in rows), max(row.rate for row in rows)
    places = [
        (
            MARGIN + row.peak / most_bytes * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - row.rate / most * (HEIGHT - 2 * MARGIN),
        )
        for row in rows
    ]
    front = " ".join(f"{x:.1f},{y:.1f}" for row, (x, y) in zip(rows, places, strict=True) if row.best)
    points = [
        f'<circle class="{"best" if row.best else "other"}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{escape(', '.join(filter(None, _cells(row))))}</title></circle>"
        for row, (x, y) in zip(rows, places, strict=True)
    ]
    low, left = HEIGHT - MARGIN, MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>',
            f'<rect width="{WIDTH}" height="{HEIGHT}"/>',
            f'<path class="axis" d="M{left} {MARGIN}V{low}H{WIDTH - MARGIN}" fill="none"/>',
            f'<text x="{left}" y="{MARGIN - 10}">{_unit(rows)}, up to {most:,.4g}</text>',
            f'<text x="{WIDTH - 2 * MARGIN}" y="{low + 20}">peak memory, up to {format_bytes(most_bytes)}</text>',
            f'<polyline class="front" points="{front}"/>',
            *points,
            "</svg>",
        ]
    )


ASSUMED = (
    "Predicted from operations on {hardware}, with {messages}; memory is parameters, gradients, optimizer state and "
    "activations in flight. Steps of many microbatches: the first ones, and the rest at their pace."
)
LINKED = "messages and sums of gradients over its links"
FREE = "messages and the exchange between replicas free"
DIMENSIONS = ("dp", "tp", "pp")
EXAMPLES = """examples:
  python -m zbcompile.plan examples/targets.py:gpt --ranks 8
  python -m zbcompile.plan examples/targets.py:llama_70b --fake --ranks 64 --memory 80GiB --global-batch 512

TARGET is called without arguments and returns (model, args), (model, args, kwargs) or
zbcompile.Example(model, args, kwargs, loss, target); args are those of one microbatch.
exit status: 0, or 2 with one line on standard error if nothing fits or the request cannot be met.
"""


@dataclass(frozen=True)
class PlanRequest(Plan):
    """The arguments of the command line."""

    global_batch: int | None
    rows: int
    svg: Path | None
    dimensions: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    request = PlanRequest(**split_options(_parser().parse_args(arguments)))
    return exit_status("zbcompile.plan", lambda: run(request), request.debug)


def run(request: PlanRequest) -> None:
    """Search and print; raises the project's errors."""
    if request.options.ranks is None:
        raise PipelineError("--ranks is missing: how many are to be used altogether?")
    rows, impossible = _searched(request, request.options.ranks)
    if not rows:
        raise PipelineError(f"no plan for {request.options.ranks} ranks: {'; '.join(impossible)}")
    print("\n".join(wrap(_assumed(request))), format_plan(rows, request.rows), sep="\n\n", end="\n\n")
    print("\n".join(line for text in impossible for line in wrap(text)), end="\n\n" if impossible else "")
    print(f"the fastest, as a program:\n  {_command(request, rows[0])}")
    if request.svg is not None:
        write_whole(request.svg, to_picture(rows).encode())
        print(request.svg)


def _assumed(request: PlanRequest) -> str:
    hardware = request.options.hardware
    messages = LINKED if hardware and hardware.within else FREE
    return ASSUMED.format(hardware=hardware or "nominal speeds of the device", messages=messages)


def _searched(request: PlanRequest, ranks: int) -> tuple[list[Row], list[str]]:
    options, say = replace(request.options, schedule="auto"), announcer()
    example = example_of(request)
    microbatch = one_microbatch(example)
    _, count = choose_cuts(microbatch.paths, microbatch.leaves, {})
    say(f"capturing {type(example.model).__name__}")
    with quiet(request):
        drawn = draw_step(example.model, microbatch, example.loss, options.choices)
        measured = measure_line(whole_of(drawn).line) if options.balance == "measured" else {}
    task = drawn, options.choices, ranks, count, _tokens(microbatch, count), request.global_batch
    rows, impossible = factorisations(*task, options.search_seconds, measured, say, request.dimensions)
    return rows, [*impossible, *([_whole(example.model)] if "tp" in request.dimensions else [])]


def _whole(model: torch.nn.Module) -> str:
    """Why no row has tp > 1."""
    name = type(model).__name__
    if not getattr(model, "tp_plan", None):
        return f"tp>1: {name} brings no tensor-parallel plan along (tp_plan is empty)"
    return (
        f"tp>1: {name} has a tensor-parallel plan, but its parts can only be captured by processes of a mesh: "
        "compare pipe.program.plan of runs with mesh="
    )


def _tokens(microbatch: Microbatch, rows: int) -> int:
    """How many tokens a row has: the longest row of whole numbers; 1 if there is none."""
    tensors = (each for each in microbatch.tensors.values() if each.dtype in (torch.int64, torch.int32))
    return max((each.numel() // rows for each in tensors if each.dim() > 1 and each.shape[0] == rows), default=1)


def _command(request: PlanRequest, row: Row) -> str:
    layout = row.layout
    kept = [name for name in options_of(Choices) if name in request.given and name not in ("recompute", "vocab")]
    flags = [f"{flag_of(name)} {_written(request.given[name])}".rstrip() for name in kept]
    parts = [
        f"python -m zbcompile.compile {request.target}{' --fake' * request.fake} --schedule auto --ranks {row.ranks}",
        f"--microbatches {layout.microbatches} --chunks {layout.found.schedule.placement.chunks}",
        f"--recompute {layout.choices.recompute} --vocab {layout.choices.vocab}",
        *flags,
        "--output program",
    ]
    note = f"   # {row.replicas} replicas: a mesh with dp={row.replicas}, pp={row.ranks}" if row.replicas > 1 else ""
    return " ".join(parts) + note


def _written(value: Any) -> str:
    return "" if value is True else ",".join(value) if isinstance(value, tuple) else str(value)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive whole number")
    return int(text)


def _dimensions(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(DIMENSIONS) or len(set(found)) < len(found) or not {"dp", "pp"} & set(found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected some of {','.join(DIMENSIONS)}, with dp or pp")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zbcompile.plan",
        description="Predict a training step for every way to divide ranks among replicas and pipelines.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.add_argument("--rows", metavar="N", type=_positive, default=12, help="rows to print (default: %(default)s)")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw rate against memory")
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and what torch prints")
    add_plan(parser, without=("schedule", "microbatches", "chunks", "loss_reduction"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
