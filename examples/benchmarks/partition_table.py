"""Prints how evenly different models are cut.

    OMP_NUM_THREADS=1 python examples/benchmarks/partition_table.py

Imbalance is the heaviest rank's load divided by the mean rank's, by FLOPs and bytes. "of the best"
is the minimised load divided by the least that any cuts of the graph reach.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

import zbcompile
from zbcompile.amounts import format_bytes
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import export_step
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.partition.balance import LoadRow, best_cuts, heaviest_piece
from zbcompile.passes.partition.balance_stages import balanced_cuts, node_loads
from zbcompile.passes.partition.cut_points import forward_line
from zbcompile.passes.step_graph import StepGraph
from zbcompile.schedules import Schedule, build

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from gpt import GPT, next_byte_loss
from tests.support.zoo import ZOO

HEADERS = (
    "model",
    "places",
    "schedule",
    "ranks",
    "cut after",
    "heaviest rank",
    "of the best",
    "boundary bytes",
)
PLANS = (("zb-h1", 2), ("zb-h1", 4), ("zb-v", 2), ("zb-v", 4))


def gpt(vocabulary: int = 256) -> zbcompile.Example:
    tokens = torch.randint(256, (2, 129))
    model = GPT(layers=12, width=256, heads=8, length=128)
    model.head = torch.nn.Linear(256, vocabulary, bias=False)
    return zbcompile.Example(
        model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous()
    )


def of_zoo(name: str) -> zbcompile.Example:
    problem = ZOO[name]
    (batch,) = problem.batches(1, 2)
    return zbcompile.Example(
        problem.model(), batch.args, dict(batch.kwargs), problem.loss, batch.target
    )


def line_of(name: str, step: StepGraph, schedule: Schedule) -> list[object]:
    """One line of the table."""
    line, hardware = forward_line(step), Hardware.find("cpu-core")
    ranks_of = [schedule.placement.rank(stage) for stage in range(schedule.stages)]
    cuts = balanced_cuts(step, line, ranks_of, hardware)
    totals = [0.0, *accumulate(node_loads(step, line, hardware))]
    framed = [0, *line.cuts, len(line.nodes)]
    row = LoadRow(totals, ranks_of, heaviest_piece(totals, framed))
    best = best_cuts(row, framed)
    assert best is not None, "balanced_cuts has found cuts"
    widths = sorted({line.crossing_bytes[cut] for cut in cuts})
    loads = row.rank_loads(cuts)
    return [
        name,
        len(line.cuts),
        schedule.name,
        schedule.ranks,
        " ".join(line.nodes[cut - 1].name for cut in cuts),
        max(loads) * len(loads) / sum(loads),
        row.heaviest(cuts) / best[0],
        " ".join(format_bytes(width).replace(".0", "") for width in widths),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", help="names, separated by commas (default: all)")
    chosen = [name for name in parser.parse_args().models.split(",") if name]
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], zbcompile.Example]] = {
        "gpt": gpt,
        "gpt-128k": partial(gpt, 128_000),
        **{name: partial(of_zoo, name) for name in ZOO},
    }
    rows = []
    for name in tqdm(chosen or makers, unit="model"):
        example = makers[name]()
        step = export_step(example.model, one_microbatch(example), example.loss).step
        for plan, ranks in PLANS:
            try:
                rows.append(line_of(name, step, build(plan, ranks, 2 * ranks)))
            except zbcompile.CompileError as error:
                tqdm.write(f"{name} {plan} {ranks}: {error}")
    print(tabulate(rows, HEADERS, tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
