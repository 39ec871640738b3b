"""How many values of the models of docs/models.md the proof of placements does not know, in a checkout:

    python examples/benchmarks/proof_share.py [--output proofs.jsonl] [--families zoo parallel ...] [--sample 8]

A model that exchanges nothing is proven whole on every rank, along "tp" (one batch) and along "ep" (a batch for each);
`parallel` are models divided along tp, cp, ep or dp, `plans` classes of transformers by their own tensor-parallel plan,
`experts` classes with experts divided along ep. Of a graph cut into two stages every operation of the forward and every
gradient counts once. The output gets a line per proof, and what it has is not done again; `--table` prints the sums.
"""

import argparse
import importlib
import json
import multiprocessing
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

from huggingface_parallel import apply_tensor_parallel_plan, divide_experts  # noqa: E402
from tests.support import timm_models, transformers_models  # noqa: E402
from tests.support.compared import one_line  # noqa: E402
from tests.support.oracle import Problem  # noqa: E402
from tests.support.proofs import Case, Made, kinds_counted, proofs_of  # noqa: E402
from tests.support.proven_models import all_cases  # noqa: E402
from tests.support.zoo import ZOO  # noqa: E402

Row = dict[str, Any]
Prepare = Callable[[Any, Any], Any]  # a model and the mesh: the model on it
KINDS = ("equal", "differing", "partial", "unknown")
ROWS = 2
_FORK = multiprocessing.get_context("fork")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("proofs.jsonl"))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", nargs="+", help="names of models or classes")
    parser.add_argument("--sample", type=int, default=1, help="of each family every n-th model (default: all)")
    parser.add_argument("--seconds", type=int, default=240, help="of CPU time per model (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print the sums of the output, and prove nothing")
    return parser.parse_args()


def on_mesh(make: Callable[[], Problem], prepare: Prepare | None = None, dimension: str = "tp") -> Case:
    def made(mesh: Any) -> Made:
        problem = make()
        model = problem.model().train()
        (batch,) = problem.batches(1, ROWS)
        return (model if prepare is None else prepare(model, mesh)), problem.loss, batch

    return Case(made, dimension, {})


def by_plan(model: Any, mesh: Any) -> Any:
    """By the plan that the model brings along, without that of its experts, which stay whole."""
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if "experts" not in pattern}
    return apply_tensor_parallel_plan(model, mesh["tp"], plan)


def divided(model: Any, mesh: Any) -> Any:
    return divide_experts(model, mesh["ep"])[0]


def of_zoo() -> Iterator[tuple[str, Case]]:
    yield from ((name, on_mesh(partial(ZOO.__getitem__, name))) for name in ZOO)


def of_timm() -> Iterator[tuple[str, Case]]:
    for name in timm_models.ARCHITECTURES:
        yield name, on_mesh(partial(timm_models.problem_of, name))


def of_transformers(prepare: Prepare | None = None, dimension: str = "tp") -> Iterator[tuple[str, Case]]:
    for entry in transformers_models.entries():
        yield entry.name, on_mesh(partial(transformers_models.problem_of, entry), prepare, dimension)


FAMILIES: dict[str, tuple[Callable[[], Any], Sequence[str]]] = {  # models, and the dimensions of each
    "parallel": (lambda: all_cases().items(), ()),
    "zoo": (of_zoo, ("tp", "ep")),
    "timm": (of_timm, ("tp", "ep")),
    "transformers": (of_transformers, ("tp", "ep")),
    "plans": (lambda: of_transformers(by_plan), ("tp",)),
    "experts": (lambda: of_transformers(divided, "ep"), ("ep",)),
}


def prove(case: Case, along: Sequence[str], seconds: int, send: Any) -> None:
    """In a process of its own, which may hang or crash."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with torch.backends.mkldnn.flags(enabled=False):  # which an LSTM needs
            found = proofs_of(case, along or (case.dimension,))
        send([{"along": name, **kinds_counted(each), **_said(each)} for name, each in found.items()])
    except Exception as error:
        send([{"along": "", "error": one_line(error)}])


def _said(proof: Any) -> Row:
    wrong = [f"{each.name}: {each.what}" for each in proof.wrong]
    return {"wrong": wrong, "unproven": sorted(proof.unknown)}


def rows_of(case: Case, along: Sequence[str], seconds: int) -> list[Row]:
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=prove, args=(case, along, seconds, theirs.send))
    process.start()
    theirs.close()
    found = [{"along": "", "error": f"the process ended, or its {seconds} s of CPU time did"}]
    try:
        if ours.poll(10 * seconds):
            found = ours.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    return found


def prove_all(given: argparse.Namespace) -> None:
    done = {(row["family"], row["name"]) for row in read(given.output)}
    with given.output.open("a") as file:
        for family in given.families:
            models, along = FAMILIES[family]
            for name, case in list(models())[:: given.sample]:
                if (family, name) in done or (given.only and name not in given.only):
                    continue
                for row in rows_of(case, along, given.seconds):
                    print(json.dumps({"family": family, "name": name, **row}), file=file, flush=True)
                    print(family, name, row, flush=True)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[Row]) -> str:
    """The sums of each family and dimension, then what is refused or unknown."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        if "error" not in row:
            found = sums.setdefault((row["family"], row["along"]), Counter())
            found.update({kind: row[kind] for kind in KINDS} | {"models": 1, "refused": bool(row["wrong"])})
            found["with unproven"] += bool(row["unproven"])
    total = sum(sums.values(), Counter())
    lines = [[*key, *_line(found)] for key, found in [*sums.items(), (("all", ""), total)]]
    heads = ["family", "along", "models", *KINDS, "% unknown", "refused", "with unproven"]
    notes = [f"{row['family']} {row['name']}: {row['error'][:160]}" for row in rows if "error" in row]
    told = [
        f"{row['family']} {row['name']} along {row['along']}: {row['unknown']} unknown, {row['wrong'][:2]} "
        f"{row['unproven'][:4]}"
        for row in rows
        if row.get("unknown") or row.get("wrong") or row.get("unproven")
    ]
    return "\n".join([tabulate(lines, heads, floatfmt=".2f"), "", *told, "", f"not proven: {len(notes)}", *notes])


def _line(found: Counter[str]) -> list[float]:
    share = 100 * found["unknown"] / max(1, sum(found[kind] for kind in KINDS))
    return [found["models"], *(found[kind] for kind in KINDS), share, found["refused"], found["with unproven"]]


def main() -> None:
    given = arguments()
    if not given.table:
        importlib.import_module("transformers.models.llama.modeling_llama")  # once, before the processes are forked
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).run_decompositions({})
        prove_all(given)
    print(table(read(given.output)))


if __name__ == "__main__":
    main()
