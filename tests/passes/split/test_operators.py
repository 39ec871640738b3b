"""A sample of torch's operators in half precision: forward and gradients of the split graph have eager's bits.

All operators: `examples/benchmarks/operator_sweep.py`.
"""

import pytest
import torch

from tests.support.operators import Case, Outcome, cases_of, outcome_of, torchs_operators

GROUPS = {
    "pointwise": "exp log1p sqrt rsqrt tanh sigmoid erf pow xlogy copysign addcmul clamp where",
    "activations": "nn.functional.gelu nn.functional.silu nn.functional.mish nn.functional.softplus nn.functional.elu "
    "nn.functional.hardswish nn.functional.softshrink nn.functional.logsigmoid nn.functional.glu",
    "reductions": "sum mean var logsumexp softmax log_softmax cumsum amax prod nn.functional.layer_norm",
    "losses": "nn.functional.mse_loss nn.functional.cross_entropy nn.functional.nll_loss nn.functional.huber_loss",
    "products": "mm bmm addmm matmul nn.functional.linear nn.functional.embedding gather index_select",
    "dropouts": "nn.functional.dropout nn.functional.alpha_dropout nn.functional.feature_alpha_dropout",
}


OF_TWO = {torch.bfloat16: 0, torch.float16: -1}


def samples(names: str, dtype: torch.dtype) -> list[Case]:
    """One of each operator that has a kernel in `dtype`, another one in the other dtype."""
    chosen = [info for info in torchs_operators() if info.name in names.split() and not info.variant_test_name]
    return [cases_of(info, dtype, 2)[OF_TWO[dtype]] for info in chosen if dtype in info.dtypes]


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("dtype", OF_TWO, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_bitwise(group: str, dtype: torch.dtype) -> None:
    cases = samples(GROUPS[group], dtype)
    assert len(cases) >= 2
    assert outcome_of(cases) == Outcome("bitwise")


def test_the_sample_is_of_known_operators() -> None:
    names = {name for names in GROUPS.values() for name in names.split()}
    assert len(names) >= 40
    assert names <= {info.name for info in torchs_operators()}
