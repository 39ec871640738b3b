"""Every combination that `test_vocabulary_models.py` samples, in processes over gloo, in a
checkout:

    python examples/benchmarks/vocab_sweep.py [--models llama gpt2] [--ranks 2 4]

transformers' Llama, GPT-2, Gemma-2 and BERT with their vocabularies sharded, under 1f1b, zb-h1,
zb-v and dualpipe-v with one and two barriers: loss and gradients of a step against the unsplit
model.
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from tests.support.pool import Pool, open_pool
from tests.support.vocabulary_models import (
    MODELS,
    SCHEDULES,
    ModelCase,
    assert_same,
    join,
    quick_step,
    unsplit,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--barriers", nargs="+", type=int, default=[1, 2])
    return parser.parse_args()


def difference(case: ModelCase, pool: Pool) -> str:
    """Empty if loss and gradients are the unsplit model's."""
    expected = unsplit(case.model)
    try:
        assert_same(
            join(pool.run(quick_step, case, ranks=case.ranks, timeout=600), expected[1]), expected
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def main() -> int:
    torch.set_num_threads(1)
    chosen, results = arguments(), []
    with open_pool() as pool:
        for case_ in product(chosen.models, chosen.schedules, chosen.ranks, chosen.barriers):
            case, start = ModelCase(*case_), time.perf_counter()
            result = difference(case, pool)
            results.append(not result)
            verdict = result or "the gradients of the unsplit model"
            print(f"{time.perf_counter() - start:6.1f} s  {case}: {verdict}", flush=True)
    print(f"{sum(results)} of {len(results)} combinations have the gradients of the unsplit model")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
