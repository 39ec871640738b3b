"""A sample of what the script `tests/support/hostile_files.py` counts in full, and what it does not reach."""

from pathlib import Path

from tests.support.hostile_files import count


def test_every_file_of_others_is_refused_in_one_line_or_read_at_once(tmp_path: Path) -> None:
    counts = count(tmp_path, 12, seed=1, show=True)
    assert counts.keys() == {"refused", "read"}
