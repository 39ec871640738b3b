"""Programs run by processes that cannot import the models' source have eager's gradients."""

from pathlib import Path

import pytest

from tests.support.training import assert_same_tensors
from tests.zbcompile.persistence.fresh_processes import MODELS, expected, run_alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", [("small-tied",), pytest.param(MODELS, marks=pytest.mark.beyond_sample)], ids=" ".join
)
def test_gradients_are_eagers_bits(models: tuple[str, ...], tmp_path: Path) -> None:
    for (model, ranks), ours in run_alone(tmp_path, models).items():
        theirs = expected(model, ranks)
        assert_same_tensors(ours.losses, theirs.losses, f"{model} at {ranks}: loss of step")
        assert_same_tensors(
            ours.gradients[0], theirs.gradients[0], f"{model} at {ranks}: gradient of"
        )
