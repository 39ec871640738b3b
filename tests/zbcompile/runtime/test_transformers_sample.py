"""Twenty classes of transformers, one step each under zb-h1 or zb-v, against eager: losses, gradients and buffers.

A run takes seven of them, of other kinds each; `pytest --every-case` takes all. All classes of transformers, under both
schedules: `examples/benchmarks/transformers_sweep.py`. Those of the zoo train for two steps in `test_zoo.py`.
"""

import pytest

from tests.support.compared import Outcome, outcome_of
from tests.support.transformers_models import entries, problem_of

SAMPLE = (
    *("ApertusForCausalLM", "BartForCausalLM", "BlenderbotForCausalLM", "BioGptForCausalLM", "Cohere2ForCausalLM"),
    *("CohereForCausalLM", "CTRLLMHeadModel", "DogeForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM"),
    *("GraniteForCausalLM", "Lfm2ForCausalLM", "DiffLlamaForCausalLM", "FlexOlmoForCausalLM", "FalconForCausalLM"),
    *("AlbertForMaskedLM", "BeitForImageClassification", "BitForImageClassification", "SwinForImageClassification"),
    "CLIPForImageClassification",
)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=7)
@pytest.mark.parametrize(("name", "schedule"), zip(SAMPLE, ("zb-h1", "zb-v") * 10, strict=True))
def test_bitwise(name: str, schedule: str) -> None:
    (entry,) = (each for each in entries() if each.name == name)
    assert outcome_of(problem_of(entry), (schedule,)) == Outcome("bitwise")
