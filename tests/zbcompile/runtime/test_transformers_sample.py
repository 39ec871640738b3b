"""Eight classes of transformers, one step each under zb-h1 or zb-v, against eager: losses, gradients and buffers.

Each has what no model of the zoo has: scaled embeddings, sinusoidal positions, parallel residuals, one
key for all heads, convolutions between attentions, layers that share their weights, relative biases, shifted windows.
All classes, under both schedules: `examples/benchmarks/transformers_sweep.py`. Those of the zoo train for two steps in
`test_zoo.py`.
"""

import pytest

from tests.support.compared import Outcome, outcome_of
from tests.support.transformers_models import entries, problem_of

SAMPLE = (
    *("BlenderbotForCausalLM", "GPTNeoXForCausalLM", "CTRLLMHeadModel", "Lfm2ForCausalLM", "FalconForCausalLM"),
    *("AlbertForMaskedLM", "BeitForImageClassification", "SwinForImageClassification"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), zip(SAMPLE, ("zb-h1", "zb-v") * 4, strict=True))
def test_bitwise(name: str, schedule: str) -> None:
    (entry,) = (each for each in entries() if each.name == name)
    assert outcome_of(problem_of(entry), (schedule,)) == Outcome("bitwise")
