"""The searched order against proven optima: small instances, solved by OR-Tools' CP-SAT.

    python examples/benchmarks/search_optimum.py --instances 60 --seconds 60 --output optimum.jsonl

Instances have 2 to 4 ranks, 3 to 8 microbatches, linear or V placement, even or uneven stages, ample or tight memory.
Needs `pip install ortools`. What the file holds is not run again.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zbcompile.schedules import Costs, search
from zbcompile.schedules.searching.certificate import certify
from zbcompile.schedules.searching.question import problems_of

EQUAL = 1e-3  # the solver's whole numbers


def instance(number: int) -> dict[str, Any]:
    """The arguments of `search`."""
    rng = random.Random(number)
    ranks = rng.randint(2, 4)
    placement = rng.choice(("linear", "v"))
    chunks = 2 if placement == "v" else 1
    spread, hop = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.2))

    def drawn(unit: float = 1 / chunks) -> tuple[float, ...]:
        return tuple(unit * rng.uniform(1 - spread, 1 + spread) for _ in range(ranks * chunks))

    costs = Costs(drawn(), drawn(), drawn(), activation=(1 / chunks,) * ranks * chunks, comm=hop)
    memory = rng.choice((None, ranks, max(chunks, 1 + ranks // 2)))
    return {
        "costs": costs,
        "ranks": ranks,
        "microbatches": rng.randint(3, 8 if placement == "linear" else 6),
        "memory_limit": memory,
        "placements": [placement],
        "barrier": rng.random() < 0.5,
    }


def run(number: int, seconds: float, moves: int | None) -> dict[str, Any]:
    given = instance(number)
    found = search(**given, seconds=seconds, moves=moves, seed=number)
    (problem,) = problems_of(**given, barriers=1)
    proof = certify(problem, problem.words(found.schedule), seconds)
    row = {name: given[name] for name in ("ranks", "microbatches", "memory_limit", "placements", "barrier")}
    figures = {"found": found.objective, "bound": found.bound, "moves": found.moves, "seconds": found.seconds}
    return {"number": number, **row, **figures, "solver": proof.bound, "optimal": proof.optimal}


def report(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    proven = [row for row in rows if row["optimal"]]
    worse = [row for row in proven if row["found"] > row["solver"] * (1 + EQUAL)]
    above = [row for row in proven if row["bound"] > row["solver"] * (1 + EQUAL)]
    own = sum(row["found"] <= row["bound"] * (1 + 1e-9) for row in rows)
    lines = [
        f"{len(rows)} instances, {len(proven)} proven optimal by the solver, {own} by the bound alone",
        f"the search equals the optimum in {len(proven) - len(worse)} of {len(proven)}",
        f"the bound is above the optimum in {len(above)}",
    ]
    lines += [f"  instance {row['number']}: found {row['found']:.6g}, optimum {row['solver']:.6g}" for row in worse]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="for the search, and again for the solver")
    parser.add_argument("--moves", type=int)
    parser.add_argument("--output", type=Path, default=Path("search_optimum.jsonl"))
    options = parser.parse_args(arguments)
    lines = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    rows = {row["number"]: row for row in map(json.loads, lines)}
    with options.output.open("a", encoding="utf-8") as file:
        for number in tqdm([n for n in range(options.instances) if n not in rows], disable=None):
            rows[number] = run(number, options.seconds, options.moves)
            print(json.dumps(rows[number]), file=file, flush=True)
    text = report(rows[number] for number in sorted(rows) if number < options.instances)
    print(text)
    return text


if __name__ == "__main__":
    main()
