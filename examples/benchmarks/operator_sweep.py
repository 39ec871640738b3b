"""Every differentiable operator of torch's own test list, captured and split, against eager
autograd, in a checkout:

    python examples/benchmarks/operator_sweep.py [--output operators.jsonl] [--dtypes bfloat16 float16 float32]

Operators, each with up to four samples, are the one stage of a model. Forward, B and W run with
`exact=True`, and every gradient is compared bit by bit; that of a weight on each result is the
result itself. The output gets a line per operator and dtype, and what it has already is not run
again. `pip install -e .[dev]` has what this needs.
"""

import argparse
import json
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from tests.support.operators import (
    KINDS,
    Case,
    Outcome,
    cases_of,
    eagers_own,
    outcome_of,
    torchs_operators,
)

Row = dict[str, str]
_FORK = multiprocessing.get_context("fork")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("operators.jsonl"))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--samples", type=int, default=4, help="per operator (default: %(default)s)"
    )
    parser.add_argument(
        "--together", type=int, default=12, help="operators in one model (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=int, default=60, help="limit per model (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", help="names of operators")
    return parser.parse_args()


def operators(dtype: torch.dtype, only: list[str] | None) -> Iterator[Any]:
    for info in torchs_operators():
        if info.supports_autograd and dtype in info.dtypes and (not only or info.name in only):
            yield info


class Sweep:
    """Runs operators together and, where that is not bitwise, in halves, down to each
    sample alone."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        self.given = options
        self.dtype = dtype
        self.found: dict[str, list[Outcome]] = {}

    def run(self, infos: list[Any]) -> list[Row]:
        """A row for each of `infos`."""
        cases = [case for info in infos for case in self._cases(info)]
        self._divide(
            [case for case in cases if self._note(case, eagers_own([case]), unless="bitwise")]
        )
        return [self._row(name, outcomes) for name, outcomes in self.found.items()]

    def _cases(self, info: Any) -> list[Case]:
        cases = cases_of(info, getattr(torch, self.dtype), self.given.samples)
        self.found[Case(info, None).name] = []
        return cases

    def _note(self, case: Case, outcome: Outcome, unless: str = "") -> bool:
        if outcome.kind != unless:
            self.found[case.name].append(outcome)
        return outcome.kind == unless

    def _divide(self, cases: list[Case]) -> None:
        outcome = self._limited(cases) if cases else Outcome("bitwise")
        if outcome.kind == "bitwise" or len(cases) == 1:
            for case in cases:
                self._note(case, outcome)
        else:
            self._divide(cases[: len(cases) // 2])
            self._divide(cases[len(cases) // 2 :])

    def _limited(self, cases: list[Case]) -> Outcome:
        """Runs in a separate process, because an operator may hang or crash."""
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=lambda: theirs.send(outcome_of(cases)))
        process.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(self.given.seconds) else Outcome("error", "time limit")
        except EOFError:
            return Outcome("error", "the process crashed")
        finally:
            process.kill()
            process.join()

    def _row(self, name: str, outcomes: list[Outcome]) -> Row:
        worst = max(
            outcomes,
            key=lambda outcome: KINDS.index(outcome.kind),
            default=Outcome("eager fails", "no sample"),
        )
        count = sum(outcome.kind == worst.kind for outcome in outcomes)
        why = f"{count} of {len(outcomes)}: {worst.why}" if worst.why else ""
        return {"operator": name, "dtype": self.dtype, "kind": worst.kind, "why": why}


def summary(rows: list[Row], dtypes: list[str]) -> str:
    counts = Counter((row["dtype"], row["kind"]) for row in rows)
    lines = ["| | " + " | ".join(dtypes) + " |", "|---" * (len(dtypes) + 1) + "|"]
    for kind in KINDS:
        lines.append(
            f"| {kind} | " + " | ".join(str(counts[dtype, kind]) for dtype in dtypes) + " |"
        )
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = read(options.output)
    done = {(row["operator"], row["dtype"]) for row in rows}
    with options.output.open("a") as file:
        for name in options.dtypes:
            infos = operators(getattr(torch, name), options.only)
            missing = [info for info in infos if (Case(info, None).name, name) not in done]
            for begin in range(0, len(missing), options.together):
                for row in Sweep(options, name).run(missing[begin : begin + options.together]):
                    rows.append(row)
                    print(json.dumps(row), file=file, flush=True)
                    if row["kind"] not in ("bitwise", "eager fails"):
                        print(f"{name} {row['operator']}: {row['kind']}: {row['why']}", flush=True)
    print(summary(rows, options.dtypes))


if __name__ == "__main__":
    main()
