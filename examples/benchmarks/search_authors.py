"""The searched order against the schedulers of the zero bubble and controllable memory papers, at
their own memory.

    python examples/benchmarks/search_authors.py --output authors.jsonl

Costs are the profiled passes of the zero bubble paper (table 9, milliseconds). Each scheduler is
built by its authors' rules; the search gets as much memory as that takes on its fullest rank, and
may use one or two stages a rank. What the file holds is not run again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from zbcompile.schedules import Costs, build, check, peak_memory, search, simulate

PROFILES = {  # F, B, W, hop; what B leaves of the activation
    "1.5B": (18.522, 18.086, 9.337, 0.601, 0.37),
    "6.2B": (29.718, 29.444, 19.927, 0.527, 0.43),
    "14.6B": (11.347, 11.248, 8.132, 0.377, 0.44),
}
SCHEDULERS = ("zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min")


def run(
    profile: str, name: str, barrier: bool, ranks: int, microbatches: int, passes: int
) -> dict[str, Any]:
    *times, comm, residue = PROFILES[profile]
    forward, backward, weight = (time / 2 for time in times)
    costs = Costs.uniform(
        2 * ranks, forward, backward, weight, activation=0.5, residue=residue / 2, comm=comm
    )
    chunks = 2 if name in ("zb-v", "v-half", "v-min") else 1
    cut = costs.resized(chunks * ranks)
    schedule = build(name, ranks, microbatches, cut)
    limit = max(peak_memory(schedule, cut))
    step = simulate(schedule, cut)
    result = search(costs, ranks, microbatches, limit, barrier=barrier, passes=passes)
    check(result.schedule, result.simulation.costs, limit)
    return {
        "case": f"{profile} {name} {'makespan' if barrier else 'cost'}",
        "memory": limit,
        "name_takes": step.makespan if barrier else step.cost,
        "found": result.objective,
        "bound": result.bound,
        "placement": str(result.schedule.placement),
    }


def report(rows: list[dict[str, Any]]) -> str:
    table = [
        (
            row["case"],
            row["memory"],
            row["name_takes"],
            row["found"],
            row["found"] / row["name_takes"],
            row["placement"],
        )
        for row in rows
    ]
    heads = ("profile, scheduler, objective", "memory", "takes", "found", "ratio", "placement")
    longer = sum(row["found"] > row["name_takes"] * (1 + 1e-9) for row in rows)
    return (
        f"{tabulate(table, headers=heads, floatfmt='.4f')}\nlonger than the authors' scheduler:"
        f" {longer}"
    )


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument("--passes", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("search_authors.jsonl"))
    options = parser.parse_args(arguments)
    lines = (
        options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    )
    rows = {row["case"]: row for row in map(json.loads, lines)}
    cases = [(p, n, b) for p in options.profiles for n in SCHEDULERS for b in (False, True)]
    names = [f"{p} {n} {'makespan' if b else 'cost'}" for p, n, b in cases]
    with options.output.open("a", encoding="utf-8") as file:
        for case, key in tqdm(list(zip(cases, names, strict=True)), disable=None):
            if key not in rows:
                rows[key] = run(*case, options.ranks, options.microbatches, options.passes)
                print(json.dumps(rows[key]), file=file, flush=True)
    text = report([rows[key] for key in names])
    print(text)
    return text


if __name__ == "__main__":
    main()
