"""Runs that are killed go on, and end with the weights of a run that was not."""

import signal
from pathlib import Path

import pytest

from tests.support.killing import PHASES, Site, environments, finish, processes, random_kills, run_compiled, wait_until


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen starts
def test_five_kills(tmp_path: Path) -> None:
    """One in each phase, at random moments; `python -m tests.support.killing` meets as many more as one likes."""
    undisturbed, disturbed = Site(tmp_path / "undisturbed"), Site(tmp_path / "disturbed")
    undisturbed.folder.mkdir()
    disturbed.folder.mkdir()
    finish(undisturbed, [])
    disturbed.lengths.update(undisturbed.lengths)
    met = finish(disturbed, random_kills(len(PHASES), seed=1))
    assert len(met) >= 4  # a phase may be over before its moment comes
    assert disturbed.weights.read_bytes() == undisturbed.weights.read_bytes()


@pytest.mark.slow
def test_a_rank_that_dies_between_its_early_update_and_the_validation(tmp_path: Path) -> None:
    """The job resumes from its checkpoint, with the bits of one that was not interrupted. Some updates are clipped."""
    more = ("--validate", "after", "--clip", "0.6")
    undisturbed, dying = Site(tmp_path / "undisturbed", more), Site(tmp_path / "dying", more, "of_a_dying_rank")
    for site in (undisturbed, dying):
        site.folder.mkdir()
    finish(undisturbed, [])
    (dying.folder / "program").symlink_to(undisturbed.folder / "program")
    with processes(dying, "train", environments()) as started:
        wait_until(lambda: False, started)
        assert [process.exitcode for process in started] == [2, -signal.SIGKILL]
    run_compiled(dying, None)
    assert dying.weights.read_bytes() == undisturbed.weights.read_bytes()
