"""Forty architectures of transformers, each trained for one step under zb-v on two ranks: losses,
gradients and buffers have the bits of eager.

Further classes, some of them under zb-h1, run with `pytest --every-case`; all classes, under both
schedules, with `examples/benchmarks/transformers_sweep.py`. Those of the zoo train for two steps in
`test_zoo.py`.
"""

import pytest

from tests.support.compared import Outcome, outcome_of
from tests.support.transformers_models import SAMPLE, entry_of, problem_of

GROUPS = 4  # tests that may run side by side
FURTHER = (
    *(
        "ApertusForCausalLM",
        "BartForCausalLM",
        "BlenderbotForCausalLM",
        "BioGptForCausalLM",
        "CohereForCausalLM",
    ),
    *(
        "CTRLLMHeadModel",
        "DogeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "GraniteForCausalLM",
    ),
    *(
        "Lfm2ForCausalLM",
        "DiffLlamaForCausalLM",
        "FlexOlmoForCausalLM",
        "FalconForCausalLM",
        "AlbertForMaskedLM",
    ),
    *("BeitForImageClassification", "BitForImageClassification", "SwinForImageClassification"),
    *("FunnelForMaskedLM", "ProphetNetForConditionalGeneration"),
)


def group(number: int) -> object:
    """Every fourth class of the sample, as a case that one worker of pytest-xdist runs."""
    worker = pytest.mark.xdist_group(f"transformers sample {number}")
    return pytest.param(SAMPLE[number::GROUPS], id=str(number), marks=worker)


@pytest.mark.slow
@pytest.mark.parametrize("names", [group(number) for number in range(GROUPS)])
def test_sample_is_bitwise(names: tuple[str, ...]) -> None:
    outcomes = {name: outcome_of(problem_of(entry_of(name)), ("zb-v",)) for name in names}
    assert outcomes == dict.fromkeys(names, Outcome("bitwise"))


@pytest.mark.slow
@pytest.mark.beyond_sample
@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(FURTHER, ("zb-h1", "zb-v") * 10, strict=True))
)
def test_further_classes_are_bitwise(name: str, schedule: str) -> None:
    assert outcome_of(problem_of(entry_of(name)), (schedule,)) == Outcome("bitwise")
