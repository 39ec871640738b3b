"""Runs that are killed go on, and end with the weights of a run that was not."""

from pathlib import Path

import pytest

from tests.support.killing import PHASES, Site, finish, random_kills


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen starts
def test_five_kills(tmp_path: Path) -> None:
    """One in each phase, at random moments; `python -m tests.support.killing` meets as many more as
    one likes."""
    undisturbed, disturbed = Site(tmp_path / "undisturbed"), Site(tmp_path / "disturbed")
    undisturbed.folder.mkdir()
    disturbed.folder.mkdir()
    finish(undisturbed, [])
    disturbed.lengths.update(undisturbed.lengths)
    met = finish(disturbed, random_kills(len(PHASES), seed=1))
    assert len(met) >= 4  # a phase may be over before its moment comes
    assert disturbed.weights.read_bytes() == undisturbed.weights.read_bytes()
