"""transformers' models with their vocabularies sharded: gradients of the unsplit model, in one
process and over gloo.

Llama untied, GPT-2 and BERT (masked LM) tied, Gemma-2 tied with a soft cap. GPT-2 meets every
schedule, the others linear ones or those of a V; `examples/benchmarks/vocab_sweep.py` runs all of
them in processes.
"""

import pytest

from tests.support.vocabulary_models import ModelCase, assert_same, quick_step, unsplit

LINEAR, V_SHAPED = ("1f1b", "zb-h1"), ("zb-v", "dualpipe-v")
RUNS = (  # model, schedules, ranks, barriers; schedules with equal stages share what is compiled
    ("llama", LINEAR, 4, 1),
    ("gpt2", LINEAR, 2, 2),
    ("gpt2", V_SHAPED, 4, 2),
    ("gemma2", V_SHAPED, 2, 1),
    ("bert", LINEAR, 4, 1),
)
CASES = [
    ModelCase(model, schedule, ranks, barriers)
    for model, schedules, ranks, barriers in RUNS
    for schedule in schedules
]


@pytest.mark.beyond_sample
@pytest.mark.mostly_slow(every=10)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_one_process(case: ModelCase) -> None:
    assert_same(quick_step(case), unsplit(case.model))
