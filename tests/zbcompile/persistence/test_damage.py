"""A sample of what the script `tests/support/damage.py` counts in full."""

from pathlib import Path

import pytest

from tests.support.damage import fill_disks, flip_checkpoints, flip_programs, kill_saves


def test_flipped_bits_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    counts = flip_checkpoints(tmp_path, 40, seed=1)
    assert counts["verification: refused"] == 40
    assert counts["index: refused"] > 0
    assert counts.keys() <= {
        "verification: refused",
        "index: refused",
        "refused",
        "silent",
    }  # silent: of a tensor


def test_flipped_bits_of_a_program_are_refused(tmp_path: Path) -> None:
    counts = flip_programs(tmp_path, 8, seed=1)
    assert counts.keys() <= {"refused", "without effect"}  # a blank in the manifest has none


def test_a_disk_that_is_full_at_any_call_is_one_message(tmp_path: Path) -> None:
    counts = fill_disks(tmp_path)
    assert counts.keys() == {
        "refused",
        "without effect",
    }  # removing a name that is not there may fail
    assert counts["refused"] >= 7


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    assert kill_saves(tmp_path, 4, seed=1)["kills"] == 4
