"""A sample of torch's operators in half precision: forward and gradients of the split graph have
eager's bits.

Each operator in one of the two dtypes, each kind of operator in both. All operators, in all dtypes:
`examples/benchmarks/operator_sweep.py`.
"""

import pytest
import torch

from tests.support.operators import Case, Outcome, cases_of, outcome_of, torchs_operators

GROUPS = {
    "pointwise": "exp log1p sqrt rsqrt tanh sigmoid erf pow xlogy copysign addcmul clamp where",
    "activations": (
        "nn.functional.gelu nn.functional.silu nn.functional.mish nn.functional.softplus"
        " nn.functional.elu nn.functional.hardswish nn.functional.softshrink"
        " nn.functional.logsigmoid nn.functional.glu"
    ),
    "reductions": (
        "sum mean var logsumexp softmax log_softmax cumsum amax prod nn.functional.layer_norm"
    ),
    "losses": (
        "nn.functional.mse_loss nn.functional.cross_entropy nn.functional.nll_loss"
        " nn.functional.huber_loss"
    ),
    "products": (
        "mm bmm addmm matmul nn.functional.linear nn.functional.embedding gather index_select"
    ),
    "dropouts": (
        "nn.functional.dropout nn.functional.alpha_dropout nn.functional.feature_alpha_dropout"
    ),
}


OF_TWO = {torch.bfloat16: 0, torch.float16: -1}


def samples(names: str) -> list[Case]:
    """One of each operator, in turn in each dtype, in the other if it has no kernel there."""
    chosen = [
        info
        for info in torchs_operators()
        if info.name in names.split() and not info.variant_test_name
    ]
    actual = []
    for number, info in enumerate(chosen):
        turn = [dtype for dtype in list(OF_TWO)[:: -1 if number % 2 else 1] if dtype in info.dtypes]
        actual += [cases_of(info, dtype, 2)[OF_TWO[dtype]] for dtype in turn[:1]]
    return actual


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("group", GROUPS)
def test_bitwise(group: str) -> None:
    cases = samples(GROUPS[group])
    assert len(cases) >= 2
    assert outcome_of(cases) == Outcome("bitwise")


def test_the_sample_is_of_known_operators() -> None:
    names = {name for names in GROUPS.values() for name in names.split()}
    assert len(names) >= 40
    assert names <= {info.name for info in torchs_operators()}
