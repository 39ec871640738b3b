"""Larger steps: what a search gains over the best name that fits.

    python examples/benchmarks/search_large.py --output large.jsonl
    python examples/benchmarks/search_large.py --sizes 64x256 --kinds noise --passes 16

Kinds: "noise", stages that spread by 10 %; "hops", a hop of a tenth of a rank's forward; "bytes",
stages that hold .5 to 1.5 times as much as the mean, and .7 of the memory of 1F1B. What the file
holds is not run again.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from zbcompile.schedules import Costs, check, search

SIZES = ("8x32", "64x256")
KINDS = ("noise", "hops", "bytes")


def step_of(kind: str, ranks: int, chunks: int) -> tuple[Costs, float]:
    """Costs in which a rank's forward takes about 1 and holds about 1, and the limit of memory."""
    rng, stages = random.Random(kind), chunks * ranks

    def drawn(spread: float) -> tuple[float, ...]:
        return tuple(rng.uniform(1 - spread, 1 + spread) / chunks for _ in range(stages))

    times = 0.1 if kind == "noise" else 0.0
    sizes, memory = (0.5, 0.7) if kind == "bytes" else (0.0, 1.0)
    forward, backward, weight = drawn(times), drawn(times), drawn(times)
    costs = Costs(
        forward, backward, weight, activation=drawn(sizes), comm=0.1 if kind == "hops" else 0
    )
    return costs, memory * ranks


def run(size: str, kind: str, passes: int) -> dict[str, Any]:
    ranks, microbatches = map(int, size.split("x"))
    costs, limit = step_of(kind, ranks, 4 if ranks <= 8 else 2)
    begun = time.process_time()
    found = search(costs, ranks, microbatches, limit, passes=passes)
    check(found.schedule, found.simulation.costs, limit)
    name, value = found.best_name or (None, None)
    return {
        "case": f"{size} {kind}",
        "found": found.objective,
        "placement": str(found.schedule.placement),
        "origin": found.origin,
        "bound": found.bound,
        "best_name": value,
        "name": name,
        "cpu": round(time.process_time() - begun, 1),
    }


def report(rows: list[dict[str, Any]]) -> str:
    heads = ("case", "found", "above the bound", "best name", "takes", "ratio", "seconds of a core")
    table = []
    for row in rows:
        ratio = None if row["best_name"] is None else row["found"] / row["best_name"]
        gap = f"{row['found'] / row['bound'] - 1:.2%}"
        table.append(
            (row["case"], row["found"], gap, row["name"], row["best_name"], ratio, row["cpu"])
        )
    return tabulate(table, headers=heads, floatfmt=".4f")


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="RANKSxMICROBATCHES")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--passes", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("search_large.jsonl"))
    options = parser.parse_args(arguments)
    lines = (
        options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    )
    rows = {row["case"]: row for row in map(json.loads, lines)}
    cases = [(size, kind) for size in options.sizes for kind in options.kinds]
    with options.output.open("a", encoding="utf-8") as file:
        for size, kind in tqdm(
            [each for each in cases if " ".join(each) not in rows], disable=None
        ):
            row = rows[f"{size} {kind}"] = run(size, kind, options.passes)
            print(json.dumps(row), file=file, flush=True)
    text = report([rows[" ".join(case)] for case in cases])
    print(text)
    return text


if __name__ == "__main__":
    main()
