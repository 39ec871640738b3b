"""A sample of what the script `examples/benchmarks/damage_sweep.py` counts in full."""

from pathlib import Path

import pytest

from benchmarks.damage_sweep import (
    edit_programs,
    fill_disks,
    flip_checkpoints,
    flip_programs,
    kill_saves,
)


def test_flipped_bits_are_refused(tmp_path: Path) -> None:
    counts = flip_checkpoints(tmp_path, 20, seed=1)
    assert counts["verification: refused"] == 20
    assert counts["index: refused"] > 0
    silent = {"silent"}  # a load does not read all of a tensor's bytes
    assert counts.keys() <= {"verification: refused", "index: refused", "refused"} | silent
    counts = flip_programs(tmp_path, 5, seed=1)
    assert counts.keys() <= {"refused", "without effect"}  # a blank in the manifest has none


def test_a_disk_that_is_full_at_any_call_is_one_message(tmp_path: Path) -> None:
    counts = fill_disks(tmp_path)  # removing a name that is not there may fail
    assert (counts.keys(), counts["refused"] >= 7) == ({"refused", "without effect"}, True)


@pytest.mark.slow
def test_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    assert kill_saves(tmp_path, 20, seed=1)["kills"] > 12


@pytest.mark.slow
def test_random_edits_of_programs_are_refused_or_have_no_effect(tmp_path: Path) -> None:
    """An edit may also make another valid program, such as one with another constant."""
    counts = edit_programs(tmp_path, 9, seed=1)
    assert counts["refused"] >= 6
    assert counts.keys() <= {"refused", "without effect", "silent"}
