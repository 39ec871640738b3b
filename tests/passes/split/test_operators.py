"""A sample of torch's operators in half precision: forward and gradients of the split graph have
eager's bits. All operators, in all dtypes: `examples/benchmarks/operator_sweep.py`."""

import pytest
import torch

from tests.support.operators import Outcome, cases_of, outcome_of, torchs_operators

NAMES = "exp pow addcmul var logsumexp cumsum addmm @gelu @softplus @cross_entropy @embedding"


@pytest.mark.slow
def test_bitwise() -> None:
    """One of each, in turn in each dtype, in the other if it has no kernel there."""
    names = NAMES.replace("@", "nn.functional.").split()
    infos = [i for i in torchs_operators() if i.name in names and not i.variant_test_name]
    assert {info.name for info in infos} == {*names}
    cases = []
    for number, info in enumerate(infos):
        turn = (torch.bfloat16, torch.float16)[:: -1 if number % 2 else 1]
        dtype = next(dtype for dtype in turn if dtype in info.dtypes)
        cases.append(cases_of(info, dtype, 2)[0 if dtype is torch.bfloat16 else -1])
    assert outcome_of(cases) == Outcome("bitwise")
