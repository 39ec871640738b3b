"""The searched order against every name that fits, and against the bound, in random settings.

    python examples/benchmarks/search_random.py --settings 500 --output found.jsonl

A setting is a model cut into 4 x ranks stages: 2 to 8 ranks, 4 to 32 microbatches, times and
activations that spread by up to 30 %, a last stage that takes 1 to 3 times as long, hops of 0 to .3
of a rank's forward, a limit of .5 to 2 times the memory that 1F1B needs, makespan or cost. What the
file holds is not run again; `--output` is the only state; `cpu` is what a core worked.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zbcompile.schedules import Costs, ScheduleError, build, check, names, search, simulate

CUT = 4  # stages per rank of the finest cut
TIGHT = 1.0  # memory of 1F1B: below this share a limit is tight


def setting(number: int) -> dict[str, Any]:
    """The setting of this number; the same in every run."""
    rng = random.Random(number)
    ranks = rng.randint(2, 8)
    return {
        "number": number,
        "ranks": ranks,
        "microbatches": rng.randint(4, 32),
        "spread": rng.uniform(0, 0.3),
        "head": rng.uniform(1, 3),
        "hop": rng.uniform(0, 0.3),
        "memory": rng.uniform(0.5, 2),
        "barrier": rng.random() < 0.5,
    }


def costs_of(setting_: dict[str, Any]) -> Costs:
    """A rank's forward takes about 1, and holds about 1."""
    rng, stages = random.Random(f"costs {setting_['number']}"), CUT * setting_["ranks"]

    def drawn() -> tuple[float, ...]:
        return tuple(
            rng.uniform(1 - setting_["spread"], 1 + setting_["spread"]) / CUT for _ in range(stages)
        )

    forward, backward, weight = (
        (*times[:-1], times[-1] * setting_["head"]) for times in (drawn(), drawn(), drawn())
    )
    return Costs(forward, backward, weight, activation=drawn(), comm=setting_["hop"])


def named(setting_: dict[str, Any], costs: Costs) -> Iterator[tuple[int, float]]:
    """The objective of every name that fits, on every number of chunks that it admits."""
    ranks, limit = setting_["ranks"], setting_["memory"] * setting_["ranks"]
    for name in sorted({*names()} - {"auto"}):
        for chunks in (1, 2, CUT):
            try:
                cut = costs.resized(chunks * ranks)
                schedule = build(name, ranks, setting_["microbatches"], cut, limit, chunks)
                check(schedule, cut, limit)
            except ScheduleError:
                continue
            if schedule.placement.kind != "dual":  # two copies of the model are another promise
                step = simulate(schedule, cut)
                yield chunks, step.makespan if setting_["barrier"] else step.cost


def run(number: int, passes: int) -> dict[str, Any]:
    """One setting: what was found, the bound, and the best name."""
    setting_ = setting(number)
    costs = costs_of(setting_)
    limit = setting_["memory"] * setting_["ranks"]
    values = list(named(setting_, costs))
    setting_["best_name"] = min((value for _, value in values), default=None)
    setting_["best_usual"] = min((value for chunks, value in values if chunks <= 2), default=None)
    begun = time.process_time()
    try:
        result = search(
            costs,
            setting_["ranks"],
            setting_["microbatches"],
            limit,
            barrier=setting_["barrier"],
            passes=passes,
        )
    except ScheduleError as error:
        return {**setting_, "none": str(error)}
    check(result.schedule, result.simulation.costs, limit)
    return {
        **setting_,
        "found": result.objective,
        "bound": result.bound,
        "placement": str(result.schedule.placement),
        "origin": result.origin,
        "cpu": round(time.process_time() - begun, 2),
    }


def report(rows: Iterable[dict[str, Any]]) -> str:
    """The promises, each with what was seen."""
    rows = [row for row in rows if "found" in row]
    named_rows = [row for row in rows if row["best_name"] is not None]
    ratios = [row["found"] / row["best_name"] for row in named_rows]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        gaps[row["memory"] < TIGHT].append(row["found"] / row["bound"] - 1)
    used = statistics.mean(row.get("cpu", math.nan) for row in rows)
    lines = [
        f"seconds of a core: {used:.1f} on average",
        f"{len(rows)} settings, {len(rows) - len(named_rows)} of which no name fits",
        f"longer than a name: {sum(ratio > 1 + 1e-9 for ratio in ratios)}",
        f"below the bound: {sum(row['found'] < row['bound'] * (1 - 1e-9) for row in rows)}",
        f"proven optimal: {sum(row['found'] <= row['bound'] * (1 + 1e-9) for row in rows)}",
    ]
    for what, best in (
        ("at 1, 2 and 4 chunks", "best_name"),
        ("as built without chunks=", "best_usual"),
    ):
        for where, ranks in (("", range(2, 9)), (" at 4 to 6 ranks", range(4, 7))):
            values = [
                row["found"] / row[best]
                for row in rows
                if row[best] is not None and row["ranks"] in ranks
            ]
            if values:
                figures = f"mean {statistics.mean(values):.4f}, best {min(values):.3f}"
                lines.append(f"ratio to the best name {what}{where}: {figures}")
    for tight, values in gaps.items():
        if values:
            lines.append(
                f"median gap, memory {'tight' if tight else 'ample'}:"
                f" {statistics.median(values):.2%}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=int, default=500, help="up to this number")
    parser.add_argument("--first", type=int, default=0, help="from this number on")
    parser.add_argument("--passes", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("search_random.jsonl"))
    options = parser.parse_args(arguments)
    lines = (
        options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    )
    rows = {row["number"]: row for row in map(json.loads, lines)}
    with options.output.open("a", encoding="utf-8") as file:
        for number in tqdm(
            [n for n in range(options.first, options.settings) if n not in rows], disable=None
        ):
            rows[number] = run(number, options.passes)
            print(json.dumps(rows[number]), file=file, flush=True)
    text = report(rows[number] for number in sorted(rows) if number < options.settings)
    print(text)
    return text


if __name__ == "__main__":
    main()
