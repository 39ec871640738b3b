"""What recomputation chosen for each stage gains: the GPTs of the zero bubble paper (`published_gpts.py`) on A100s,
simulated, with a share of the memory that 1F1B needs for activations without recomputation.

    PYTHONPATH=examples python examples/benchmarks/recompute_stages.py [NAME ...] --memory .6 .4 --seconds 20

Each line is the step that `schedule="auto"` predicts: everything recomputed, the best of several budgets that are one
share of the bytes for all stages, the best price of a byte for all stages, and what the search chooses for each stage.
Cuts and orders are searched for each, equally long. "least ms" is what no step of a line takes less than, with any
order, any share of twenty that a stage keeps and any cuts where blocks begin (`zbcompile/planning/least_step.py`). With
`--core-seconds` only the time in which a core works for a search counts: other load on the machine changes nothing.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from tabulate import tabulate

import zbcompile
from benchmarks.published_gpts import PUBLISHED, Published, example_of
from zbcompile.cli.fake_models import fake_models
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import lay_out_step
from zbcompile.compiler.cut_planning import places_of
from zbcompile.passes.compile_options import Choices, Recompute
from zbcompile.passes.errors import PartitionError
from zbcompile.planning.fastest_layouts import fastest_layouts
from zbcompile.planning.layouts import LayoutSearch
from zbcompile.planning.least_step import LeastStep
from zbcompile.planning.planner import PricedStep
from zbcompile.program.choice import Choice
from zbcompile.schedules import build

BUDGETS = (0.75, 0.5, 0.25)


def search_of(published: Published, hardware: str, chunks: int | None) -> LayoutSearch:
    choices = Choices(accumulate_dtype=torch.float16, hardware=zbcompile.Hardware.find(hardware))
    with fake_models():
        example = example_of(*published[:3], 1024, published.rows)
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss, choices)
    lines = PricedStep(laid_out, choices).costs(published.ranks)
    return LayoutSearch(lines, published.ranks, published.microbatches, choices, chunks=chunks)


def limit(search: LayoutSearch, share: float) -> int:
    """Bytes of a rank: what it always holds and what a pass needs, and a share of the activations of 1F1B."""
    prices, layout = search.lines["off"], search.layout("linear", "off")
    edges = search.equal_cuts(layout) or []
    always = max(prices.held_by_any_order(layout.parsed, edges, recompute="off"))
    whole = max(prices.most_held(build("1f1b", search.ranks, search.microbatches), edges, recompute="off"))
    return round(always + share * max(0.0, whole - always))


def least(search: LayoutSearch, memory: int) -> float:
    prices = search.lines["off"]
    edges = sorted({*prices.blocks} & {*places_of(prices.line)})
    bound = LeastStep(prices, search.ranks, search.microbatches, memory, edges).least(prices.levels)
    assert bound is not None, "everything recomputed fits"
    return bound[0]


def found(search: LayoutSearch, memory: int, recompute: Recompute, seconds: float) -> Choice | None:
    choices = replace(search.choices, memory=memory, recompute=recompute)
    try:
        return fastest_layouts(replace(search, choices=choices), seconds)[0]
    except PartitionError:
        return None


def rows(name: str, options: argparse.Namespace) -> Iterator[list[object]]:
    search = search_of(PUBLISHED[name], options.hardware, options.chunks or None)
    for share in options.memory:
        memory = limit(search, share)
        full = found(search, memory, "full", options.seconds)
        budgets = [some for b in BUDGETS if (some := found(search, memory, b, options.seconds)) is not None]
        each = found(search, memory, "hints", options.seconds)
        prices = replace(search, choices=replace(search.choices, memory=memory)).corners[1:-1]
        alike = [some for price in prices if (some := found(search, memory, price, options.seconds)) is not None]
        assert full is not None, "everything recomputed fits into these shares"
        assert each is not None, "so does what may recompute everything"
        one = min(budgets, key=lambda choice: choice.seconds, default=full)
        price = min(alike, key=lambda choice: choice.seconds, default=full)
        times = [1e3 * choice.seconds for choice in (full, one, price, each)]
        lower = 1e3 * least(search, memory)
        assert max(each.peak) <= memory
        gains = [1 - times[-1] / time for time in times[:-1]]
        yield [name, share, *times, lower, *gains, str(each.layout)]


FORMATS = ("", ".1f", *(".0f",) * 5, *(".1%",) * 3, "")
TIMES = ("full ms", "one budget ms", "one price ms", "each stage ms", "least ms")
HEADERS = ("model", "memory", *TIMES, *("gain",) * 3, "chosen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PUBLISHED), metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--hardware", default="a100-80g")
    parser.add_argument("--memory", type=float, nargs="+", default=[0.6, 0.4], help="default: .6 .4")
    parser.add_argument("--chunks", type=int, default=1, help="stages a rank; 0: any number (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="for each search (default: %(default)s)")
    parser.add_argument("--core-seconds", type=float, help="instead of --seconds: of a core's work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.core_seconds else time.monotonic
    options.seconds = options.core_seconds or options.seconds
    with mock.patch.object(time, "monotonic", clock):
        for name in options.names:
            for row in rows(name, options):
                print(tabulate([row], HEADERS, floatfmt=FORMATS), flush=True)


if __name__ == "__main__":
    main()
