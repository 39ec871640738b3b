"""Forty architectures of transformers, each trained for one step under zb-v on two ranks: losses,
gradients and buffers have the bits of eager.

The suite takes three of them, `pytest --every-case` all; all classes, under zb-h1 too:
`examples/benchmarks/transformers_sweep.py`. Those of the zoo train for
two steps in `test_zoo.py`.
"""

import pytest

from tests.support.compared import Outcome, outcome_of
from tests.support.transformers_models import SAMPLE, entry_of, problem_of

GROUPS = 14  # tests that may run side by side


def group(number: int) -> object:
    """Every fourteenth class of the sample, as a case that one worker of pytest-xdist runs."""
    marks = [pytest.mark.xdist_group(f"transformers sample {number}")]
    marks += [pytest.mark.beyond_sample] * (number > 0)
    return pytest.param(SAMPLE[number::GROUPS], id=str(number), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("names", [group(number) for number in range(GROUPS)])
def test_sample_is_bitwise(names: tuple[str, ...]) -> None:
    outcomes = {name: outcome_of(problem_of(entry_of(name)), ("zb-v",)) for name in names}
    assert outcomes == dict.fromkeys(names, Outcome("bitwise"))
