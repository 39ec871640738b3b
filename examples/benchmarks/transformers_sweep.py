"""Every class behind transformers' Auto classes that train with labels, tiny, against eager, in a
checkout:

    python examples/benchmarks/transformers_sweep.py [--output transformers.jsonl] [--only GPT2LMHeadModel ...]

Each class is trained for a step under zb-h1 and zb-v, with `exact=True`, and its loss, gradients
and buffers are compared with eager accumulation bit by bit. A class with experts gets a second row,
with their default implementation. The output gets a line per row, and what it has already is not
run again; `--again KIND` runs an outcome's rows anew. `--table` prints the table of docs/models.md.
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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from benchmarks.eager_comparison import KINDS, Outcome, one_line, outcome_of
from benchmarks.tiny_batches import LABELS
from benchmarks.transformers_models import Entry, entries, has_experts, problem_of
from tests.support.oracle import Batch, Problem

Row = dict[str, Any]
_FORK = multiprocessing.get_context("fork")
SCHEDULES = ("zb-h1", "zb-v")
PATCHES = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "drop_rate": 0.1,
}
WINDOWS = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "drop_rate": 0.1,
}

TIMM: Mapping[str, Mapping[str, Any]] = {
    "test_vit": {"img_size": 64, "drop_rate": 0.1},
    "test_vit_relpos": {"img_size": 64},
    "test_resnet": {"drop_rate": 0.1},
    "test_convnext": {},
    "test_convnext2": {},
    "test_efficientnet": {"drop_rate": 0.1},
    "test_efficientnet_gn": {},
    "test_byobnet": {},
    "test_efficientnet_ln": {},
    "test_nfnet": {},
    "test_mambaout": {},
    "test_coatnet": {"img_size": 64},
    "test_maxvit": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": PATCHES,
    "beit_base_patch16_224": PATCHES,
    "cait_xxs24_224": {**PATCHES, "depth_token_only": 1},
    "convit_tiny": PATCHES,
    "xcit_nano_12_p8_224": PATCHES,
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
}


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
    """Imports the modules of all rows before their processes are forked: half of their time. No
    backward runs here: autograd does not survive a fork."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})


def entries_of(family: str) -> list[Entry]:
    if family == "transformers":
        return entries()
    return [Entry(family, name, name) for name in TIMM]


def timm_problem(name: str) -> Problem:
    """An architecture of timm, tiny: convolutions, transformers, and mixtures of both."""
    edge = TIMM[name].get("img_size", 64)

    def make() -> Any:
        return importlib.import_module("timm").create_model(name, num_classes=LABELS, **TIMM[name])

    def pictures(size: int) -> Batch:
        return Batch((torch.randn(size, 3, edge, edge),), {}, torch.randint(0, LABELS, (size,)))

    return Problem(make, torch.nn.functional.cross_entropy, pictures)


def run(entry: Entry, seconds: int, send: Any) -> None:
    """Runs in a separate process, because a model may hang or crash."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        problem = timm_problem(entry.name) if entry.task == "timm" else problem_of(entry)
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
    elapsed = round(time.perf_counter() - began, 1)
    return {**asdict(entry), **asdict(outcome), "has_experts": experts, "seconds": elapsed}


def selected_entries(options: argparse.Namespace) -> list[Entry]:
    chosen = [
        e
        for e in entries_of(options.family)
        if not options.only or {e.name, e.architecture, e.task} & set(options.only)
    ]
    return chosen[:: options.sample or 1]


def run_all(options: argparse.Namespace, rows: dict[tuple[str, str], Row]) -> Iterator[Row]:
    """The rows that are missing; of a class with experts two."""
    for entry in selected_entries(options):
        for variant in (entry, replace(entry, experts="")):
            finished = rows.get((variant.name, variant.experts))
            if finished is None or finished["kind"] in options.again:
                finished = row_of(variant, options.seconds)
                yield finished
            if not finished["has_experts"]:
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
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: KINDS.index(row["kind"])):
        if row["kind"] != "bitwise":
            reason = re.sub(r"\(.*?\)|'.*?'|\S*\.\S+|[\d.]+(e-\d+)?", "…", row["why"])[:80]
            groups.setdefault((row["kind"], reason), []).append(row)
    for (kind, _), group in groups.items():
        names = ", ".join(
            row["name"] + ("" if row["experts"] else " (default experts)") for row in group
        )
        yield f"| {kind} | {group[0]['why'][:240].replace('|', '/')} | {names} |"


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each class and kind of experts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["name"], row["experts"]): row for row in map(json.loads, lines)}


def main() -> None:
    options = arguments()
    rows = read(options.output)
    if options.table:
        print(table(list(rows.values())))
        return
    if importlib.util.find_spec(options.family) is None:
        print(f"{options.family} is not installed: nothing was run.")
        return
    import_everything()
    with options.output.open("a") as file:
        for row in run_all(options, rows):
            rows[row["name"], row["experts"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(
                f"{row['seconds']:6.1f} s  {row['name']}: {row['kind']} {row['why'][:200]}",
                flush=True,
            )
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
