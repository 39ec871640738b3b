"""State dicts: eager's keys and tensors, this rank's share or all of it, strict when loaded."""

from pathlib import Path

import pytest
import torch

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import Case, assert_same_tensors, pipeline_of

CASE = Case("small-tied", "zb-v", 2, 2)


def compiled(case: Case = CASE) -> zbcompile.Pipeline:
    batch = PROBLEMS[case.problem].batches(1, 4)[0]
    return pipeline_of(case).compile(*batch.args, target=batch.target)


def trained_model(problem: str = CASE.problem) -> torch.nn.Module:
    """A model whose weights differ from those that a new pipeline starts with."""
    model = PROBLEMS[problem].model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def load_and_save(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load a file into a pipeline; its own share and its full state dict."""
    pipe = compiled()
    pipe.load_state_dict(torch.load(path))
    return dict(pipe.state_dict()), dict(pipe.state_dict(full=True))


@pytest.mark.slow
def test_eager_to_pipeline_and_back(tmp_path: Path, pool: Pool) -> None:
    """`torch.save(model.state_dict())` loads into the pipeline, and the pipeline's full dict loads
    into eager."""
    saved = trained_model().state_dict()
    torch.save(saved, tmp_path / "eager.pt")
    local, full = load_and_save(str(tmp_path / "eager.pt"))
    assert_same_tensors(local, saved, "in one process:")
    assert list(full) == list(saved)
    for share, complete in pool.run(load_and_save, str(tmp_path / "eager.pt")):
        assert list(complete) == list(saved)
        assert_same_tensors(complete, saved, "full:")
        assert share.keys() < saved.keys()
        assert_same_tensors(share, {key: saved[key] for key in share}, "share:")
    torch.save(full, tmp_path / "pipeline.pt")
    model = PROBLEMS[CASE.problem].model()
    model.load_state_dict(torch.load(tmp_path / "pipeline.pt"))
    assert_same_tensors(model.state_dict(), saved, "back in eager:")


def shares() -> tuple[set[str], set[str]]:
    pipe = compiled()
    return set(pipe.state_dict()), {name for name, _ in pipe.named_parameters()}


@pytest.mark.slow
def test_tied_parameters_stand_under_both_names_where_they_live(pool: Pool) -> None:
    """The ranks' shares together are eager's keys; a tied weight is one parameter with two keys."""
    results = pool.run(shares, ranks=2)
    model = PROBLEMS[CASE.problem].model()
    assert set().union(*(keys for keys, _ in results)) == set(model.state_dict())
    assert set().union(*(names for _, names in results)) == {
        name for name, _ in model.named_parameters()
    }
    for keys, names in results:
        assert ("head.weight" in keys) == ("token.weight" in keys) == ("token.weight" in names)
        assert "head.weight" not in names


def test_what_is_frozen_can_be_left_out() -> None:
    pipe = compiled()
    for name, parameter in pipe.model.named_parameters():
        parameter.requires_grad_(name.startswith("norm"))
    assert set(pipe.state_dict(full=True, frozen=False)) == {"norm.weight", "norm.bias"}
    with pytest.raises(zbcompile.PipelineError, match=r"frozen=False.*pass full=True"):
        pipe.state_dict(frozen=False)


def load_damaged(damage: str) -> None:
    """Only rank 1's copy of the dict is damaged where there are ranks: the error must still be on
    both."""
    state = trained_model().state_dict()
    if damage == "missing":
        del state["norm.bias"]
    elif damage == "unexpected":
        state["extra.weight"] = torch.zeros(1)
    else:
        state["norm.bias"] = torch.zeros(7)
    compiled().load_state_dict(state)


MESSAGES = {
    "missing": r"missing \['norm\.bias'\], unexpected nothing",
    "unexpected": r"missing nothing, unexpected \['extra\.weight'\]",
    "shape": r"norm\.bias has shape \[7\] in the state dict and \[32\] in the model",
}


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("damage", MESSAGES)
def test_loading_is_strict(damage: str) -> None:
    pipe = compiled()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    with pytest.raises(zbcompile.PipelineError, match=MESSAGES[damage]):
        load_damaged(damage)
    assert_same_tensors(dict(pipe.state_dict()), before, "after a refused load:")


@pytest.mark.slow
def test_loading_is_strict_on_every_rank(pool: Pool) -> None:
    """A key that only one rank would use is missed by all."""
    for outcome in pool.outcomes(load_damaged, "missing"):
        assert outcome.error == "PipelineError"
        assert "norm.bias" in outcome.text
