"""Every combination of the promise that `tests/zbcompile/engine/test_combinations.py` samples
pairwise, in a checkout:

    python examples/benchmarks/oracle_sweep.py [--schedules 1f1b zb-h1 zb-v] [--microbatches 1 2 5 8]

Pipelined training with `exact=True` against eager gradient accumulation: three AdamW steps, every
loss, gradient and state dict entry compared bit by bit; in one process on 1, 2 and 4 ranks, and in
2 and 4 processes over gloo.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from tests.support.pool import Pool, open_pool
from tests.support.training import Case, assert_bitwise, join, pipelined, reference

PLACES = (
    (1, False),
    (2, False),
    (4, False),
    (2, True),
    (4, True),
)  # ranks, in processes of their own


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 2, 5, 8])
    parser.add_argument("--problems", nargs="+", default=["gpt", "gpt-tied"])
    return parser.parse_args()


def combinations(chosen: argparse.Namespace) -> Iterator[tuple[Case, bool]]:
    for (ranks, processes), *rest in product(
        PLACES, chosen.problems, chosen.schedules, chosen.microbatches
    ):
        problem, schedule, microbatches = rest
        yield Case(problem, schedule, ranks, microbatches), processes


def difference(case: Case, processes: bool, pool: Pool) -> str:
    """Empty when every bit is equal."""
    try:
        ours = (
            join(pool.run(pipelined, case, ranks=case.ranks, timeout=300))
            if processes
            else pipelined(case)
        )
        assert_bitwise(ours, reference(case))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def main() -> int:
    torch.set_num_threads(1)  # as in the workers: sums change their bits with the number of threads
    results = []
    with open_pool() as pool:
        for case, processes in combinations(arguments()):
            start = time.perf_counter()
            result = difference(case, processes, pool)
            results.append(not result)
            place = "gloo" if processes else "in process"
            print(
                f"{time.perf_counter() - start:6.1f} s  {case} {place}: {result or 'bitwise equal'}",
                flush=True,
            )
    print(f"{sum(results)} of {len(results)} combinations are bitwise equal to eager")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
