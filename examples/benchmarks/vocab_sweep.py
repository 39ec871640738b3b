"""Every combination that `test_vocabulary.py` samples, in processes over gloo, in a
checkout:

    python examples/benchmarks/vocab_sweep.py [--models llama gpt2] [--ranks 2 4]

transformers' Llama, GPT-2, Gemma-2 and BERT with their vocabularies sharded, under 1f1b, zb-h1,
zb-v and dualpipe-v with one and two barriers: loss and gradients of a step against the unsplit
model.
"""

import argparse
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch

from tests.support.pool import Pool, open_pool
from tests.support.vocabulary_training import (
    Learned,
    VocabularyCase,
    assert_equal_within,
    eager,
    join,
    sharded,
)

MODELS = ("llama", "gpt2", "gemma2", "bert")
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")
BOUND = 1e-6  # of the largest entry: these models compute their losses in fp32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--barriers", nargs="+", type=int, default=[1, 2])
    return parser.parse_args()


@cache
def unsplit(model: str) -> Learned:
    return eager(VocabularyCase(model, "1f1b", 1, 1, microbatches=8))


def difference(case: VocabularyCase, pool: Pool) -> str:
    """Empty if loss and gradients are the unsplit model's."""
    try:
        shares = pool.run(sharded, case, ranks=case.ranks, timeout=600)
        assert_equal_within(join(shares), unsplit(case.model), BOUND)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def main() -> int:
    torch.set_num_threads(1)
    chosen, results = arguments(), []
    with open_pool() as pool:
        values = product(chosen.models, chosen.schedules, chosen.barriers, chosen.ranks)
        for case_ in values:
            case, start = VocabularyCase(*case_, microbatches=8), time.perf_counter()
            result = difference(case, pool)
            results.append(not result)
            verdict = result or "the gradients of the unsplit model"
            print(f"{time.perf_counter() - start:6.1f} s  {case}: {verdict}", flush=True)
    print(f"{sum(results)} of {len(results)} combinations have the gradients of the unsplit model")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
