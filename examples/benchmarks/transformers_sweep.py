"""Every class behind transformers' Auto classes that train with labels, tiny, against eager, in a
checkout:

    python examples/benchmarks/transformers_sweep.py [--output transformers.jsonl] [--only GPT2LMHeadModel ...]

Each class is trained for a step under zb-h1 and zb-v, with `exact=True`, and its loss, gradients
and buffers are compared with eager accumulation bit by bit. A class with experts gets a second row,
with their default implementation. The output gets a line per row, and what it has already is not
run again; `--again KIND` runs an outcome's rows anew. `--table` prints what docs/models.md shows.
`pip install -e .[dev]` has what this needs. `--family timm` does the same with architectures of
timm, if it is installed.
"""

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from tests.support import timm_models
from tests.support.compared import KINDS, Outcome, one_line, outcome_of
from tests.support.transformers_models import Entry, entries, has_experts, problem_of

Row = dict[str, Any]
_FORK = multiprocessing.get_context("fork")
SCHEDULES = ("zb-h1", "zb-v")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("transformers.jsonl"))
    parser.add_argument("--family", choices=["transformers", "timm"], default="transformers")
    parser.add_argument(
        "--only", nargs="+", help="names of classes, architectures or Auto classes (CAUSAL_LM)"
    )
    parser.add_argument("--sample", type=int, help="every n-th class")
    parser.add_argument(
        "--seconds", type=int, default=120, help="of CPU time per row (default: %(default)s)"
    )
    parser.add_argument(
        "--again",
        nargs="+",
        choices=KINDS,
        default=[],
        help="run rows with these outcomes once more",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the output, and run nothing"
    )
    return parser.parse_args()


def import_everything() -> None:
    """What every row imports, before the processes of the rows are forked: half of their time. No
    backward runs here: autograd does not survive a fork."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})


def entries_of(family: str) -> list[Entry]:
    if family == "transformers":
        return entries()
    return [Entry(family, name, name) for name in timm_models.ARCHITECTURES]


def run(entry: Entry, seconds: int, send: Any) -> None:
    """In a process of its own, which may hang or crash."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        problem = timm_models.problem_of(entry.name) if entry.task == "timm" else problem_of(entry)
    except Exception as error:
        send((Outcome("not built", one_line(error)), False))
        return
    outcome = outcome_of(problem, SCHEDULES)
    send((outcome, outcome.kind != "not built" and has_experts(problem.model())))


def row_of(entry: Entry, seconds: int) -> Row:
    ours, theirs = _FORK.Pipe(duplex=False)
    began = time.perf_counter()
    process = _FORK.Process(target=run, args=(entry, seconds, theirs.send))
    process.start()
    theirs.close()
    outcome, experts = Outcome("crash", "time limit"), False
    try:
        if ours.poll(10 * seconds):
            outcome, experts = ours.recv()
    except EOFError:
        outcome = Outcome(
            "crash", f"the process ended ({process.exitcode}), or its {seconds} s of CPU time did"
        )
    process.kill()
    process.join()
    seconds_taken = round(time.perf_counter() - began, 1)
    return {**asdict(entry), **asdict(outcome), "has_experts": experts, "seconds": seconds_taken}


def wanted(given: argparse.Namespace) -> list[Entry]:
    chosen = [
        e
        for e in entries_of(given.family)
        if not given.only or {e.name, e.architecture, e.task} & set(given.only)
    ]
    return chosen[:: given.sample or 1]


def run_all(given: argparse.Namespace, rows: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """The rows that are missing; of a class with experts two."""
    for entry in wanted(given):
        for each in (entry, replace(entry, experts="")):
            known = rows.get((each.name, each.experts))
            if known is None or known["kind"] in given.again:
                known = row_of(each, given.seconds)
                yield known
            if not known["has_experts"]:
                break


def table(rows: list[Row]) -> str:
    """Counts of outcomes by Auto class, then the classes that are not bitwise, with the reason."""
    counts = Counter((row["task"], row["kind"]) for row in rows) + Counter(
        ("all", row["kind"]) for row in rows
    )
    lines = ["| | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for task in [*dict.fromkeys(row["task"] for row in rows), "all"]:
        lines.append(f"| {task} | " + " | ".join(str(counts[task, kind]) for kind in KINDS) + " |")
    return "\n".join([*lines, "", "| outcome | why | classes |", "|---|---|---|", *reasons(rows)])


def reasons(rows: list[Row]) -> Iterator[str]:
    """Classes with the same reason stand together; what stands in brackets or quotes may differ
    between them."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: KINDS.index(row["kind"])):
        if row["kind"] != "bitwise":
            alike = re.sub(r"\(.*?\)|'.*?'|\S*\.\S+|[\d.]+(e-\d+)?", "…", row["why"])[:80]
            found.setdefault((row["kind"], alike), []).append(row)
    for (kind, _), alike_rows in found.items():
        names = ", ".join(
            row["name"] + ("" if row["experts"] else " (default experts)") for row in alike_rows
        )
        yield f"| {kind} | {alike_rows[0]['why'][:240].replace('|', '/')} | {names} |"


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each class and kind of experts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["name"], row["experts"]): row for row in map(json.loads, lines)}


def main() -> None:
    given = arguments()
    rows = read(given.output)
    if given.table:
        print(table(list(rows.values())))
        return
    if importlib.util.find_spec(given.family) is None:
        print(f"{given.family} is not installed: nothing was run.")
        return
    import_everything()
    with given.output.open("a") as file:
        for row in run_all(given, rows):
            rows[row["name"], row["experts"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(
                f"{row['seconds']:6.1f} s  {row['name']}: {row['kind']} {row['why'][:200]}",
                flush=True,
            )
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
