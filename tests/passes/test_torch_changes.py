"""What differs between the releases of torch: the table, the torch that runs, and the page that
shows it."""

from pathlib import Path

import pytest

from zbcompile.passes.torch_private import RELEASE, Change

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.parametrize("change", Change)
def test_the_torch_that_runs_has_what_its_release_has(change: Change) -> None:
    assert change.is_here() == (change.since <= RELEASE)


def test_the_page_has_the_table() -> None:
    rows = [f"| {'.'.join(map(str, change.since))} | {change.what} |" for change in Change]
    assert "\n".join(["| from | what differs |", "|---|---|", *rows, ""]) in PAGE.read_text(
        encoding="utf-8"
    )
