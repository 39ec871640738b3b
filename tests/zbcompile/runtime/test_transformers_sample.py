"""Eight classes of transformers that are built unlike each other and unlike those of the zoo, one step each under zb-h1
or zb-v, against eager: losses, gradients and buffers.

All classes, under both: `examples/benchmarks/transformers_sweep.py`. Those of the zoo train for two steps in
`test_zoo.py`.
"""

import pytest

from tests.support.compared import Outcome, outcome_of
from tests.support.transformers_models import entries, problem_of

SAMPLE = (
    "AlbertForMaskedLM",  # one layer, used several times
    "BitForImageClassification",  # convolutions whose weights are standardised
    "DogeForCausalLM",  # masks that are computed from values
    "FalconForCausalLM",  # one key for all heads
    "FlexOlmoForCausalLM",  # experts
    "GPTJForCausalLM",  # attention beside the MLP, rotated in part
    "Lfm2ForCausalLM",  # short convolutions between attention
    "SwinForImageClassification",  # shifted windows
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), zip(SAMPLE, ("zb-h1", "zb-v") * 4, strict=True))
def test_bitwise(name: str, schedule: str) -> None:
    (entry,) = (each for each in entries() if each.name == name)
    assert outcome_of(problem_of(entry), (schedule,)) == Outcome("bitwise")
