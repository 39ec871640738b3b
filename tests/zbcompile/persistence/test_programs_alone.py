"""Programs run by processes that cannot import the models' source have eager's gradients."""

import pytest

from tests.support.fresh_processes import MODELS, PLANS, expected, run_alone
from tests.support.training import Trained, assert_same_tensors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Trained]:
    return run_alone(tmp_path_factory.mktemp("alone"), MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_eagers_bits(model: str, ranks: int, found: dict[tuple[str, int], Trained]) -> None:
    ours, theirs = found[model, ranks], expected(model, ranks)
    assert_same_tensors(ours.losses, theirs.losses, "loss of step")
    assert_same_tensors(ours.gradients[0], theirs.gradients[0], "gradient of")
