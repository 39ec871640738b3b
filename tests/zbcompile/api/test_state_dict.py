"""State dicts: eager's keys and tensors, this rank's share or all of it, strict when loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.refused import said
from tests.support.training import Case, assert_same_tensors, compiled_once, pipeline_of

PROBLEM = PROBLEMS["small-tied"]


def compiled() -> zbcompile.Pipeline:
    batch = PROBLEM.batches(1, 4)[0]
    pipe = pipeline_of(Case("small-tied", "zb-v", 2, 2))
    with compiled_once("small-tied", exact=True):
        return pipe.compile(*batch.args, target=batch.target)


def trained() -> dict[str, Tensor]:
    """Weights that differ from those that a new pipeline starts with."""
    return {name: value * 1.5 for name, value in PROBLEM.model().state_dict().items()}


DAMAGED = {
    r"missing \['norm\.bias'\], unexpected nothing": lambda state: state.pop("norm.bias"),
    r"missing nothing, unexpected \['extra\.weight'\]": lambda state: state.update(
        {"extra.weight": torch.zeros(1)}
    ),
    r"norm\.bias has shape \[7\] in the state dict and \[32\] in the": lambda state: state.update(
        {"norm.bias": torch.zeros(7)}
    ),
}


def load_and_save(path: str) -> Any:
    """Load a file into a pipeline; its own share, its full state dict, its names, and the error of
    a key that only one rank would use."""
    pipe = compiled()
    pipe.load_state_dict(torch.load(path))
    share, full = dict(pipe.state_dict()), dict(pipe.state_dict(full=True))
    state = trained()
    del state["norm.bias"]
    error = said(lambda: pipe.load_state_dict(state))
    return share, full, {name for name, _ in pipe.named_parameters()}, error


@pytest.mark.slow
def test_tied_parameters_stand_under_both_names_where_they_live(tmp_path: Path, pool: Pool) -> None:
    """`torch.save(model.state_dict())` loads into the pipeline, and the pipeline's full dict loads
    into eager. The ranks' shares together are eager's keys; a tied weight is one parameter with two
    keys. Every rank misses a key."""
    saved, model = trained(), PROBLEM.model()
    torch.save(saved, tmp_path / "eager.pt")
    local, full, _, _ = load_and_save(str(tmp_path / "eager.pt"))
    assert_same_tensors(local, saved, "in one process:")
    results = pool.run(load_and_save, str(tmp_path / "eager.pt"))
    for share, complete, names, (error, text) in results:
        assert list(complete) == list(saved)
        assert_same_tensors(complete, saved, "full:")
        assert share.keys() < saved.keys()
        assert_same_tensors(share, {key: saved[key] for key in share}, "share:")
        assert ("head.weight" in share) == ("token.weight" in share) == ("token.weight" in names)
        assert "head.weight" not in names
        assert error == "PipelineError"
        assert "norm.bias" in text
    assert set().union(*(result[0] for result in results)) == saved.keys()
    assert set().union(*(result[2] for result in results)) == dict(model.named_parameters()).keys()
    model.load_state_dict(full)
    assert_same_tensors(model.state_dict(), saved, "back in eager:")


def test_what_is_frozen_can_be_left_out_and_loading_is_strict() -> None:
    pipe = compiled()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    for message, damage in DAMAGED.items():
        state = trained()
        damage(state)
        with pytest.raises(zbcompile.PipelineError, match=message):
            pipe.load_state_dict(state)
    assert_same_tensors(dict(pipe.state_dict()), before, "after a refused load:")
    for name, parameter in pipe.model.named_parameters():
        parameter.requires_grad_(name.startswith("norm"))
    assert set(pipe.state_dict(full=True, frozen=False)) == {"norm.weight", "norm.bias"}
    with pytest.raises(zbcompile.PipelineError, match=r"frozen=False.*pass full=True"):
        pipe.state_dict(frozen=False)
