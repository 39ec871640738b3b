"""What was searched before is read again, and the answer is the same."""

import gzip
from pathlib import Path

import pytest

from zbcompile.planning import search_cache
from zbcompile.planning.search_cache import NEAR, cached_search
from zbcompile.schedules import Costs, ScheduleError, SearchResult

COSTS = Costs((1.0, 1.5, 1.25, 2.0), (1.0, 1.5, 1.25, 2.5), (1.0, 1.0, 1.25, 2.0), comm=0.1)


def asked(moves: int = 50, limit: float = 4.0) -> SearchResult:
    return cached_search(COSTS, 2, 4, (limit, limit), "v", 1, 60, moves)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZBCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(search_cache, "WORTH", 0.0)
    return tmp_path / "cache"


def refuse(*args: object, **options: object) -> SearchResult:
    raise ScheduleError("searched")


def test_the_same_answer(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked()
    monkeypatch.setattr(search_cache, "search", refuse)
    again = asked()
    assert again == found
    near = [(takes, str(order.orders)) for takes, order in found.named if takes <= NEAR * found.objective]
    assert near
    assert [(takes, str(order.orders)) for takes, order in again.named] == near
    for other in ({"moves": 51}, {"limit": 4.5}):
        with pytest.raises(ScheduleError, match="searched"):
            asked(**other)  # type: ignore[arg-type]


def test_a_damaged_file_is_no_answer(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked()
    (file,) = kept.iterdir()
    for damaged in (file.read_bytes()[:-20], gzip.compress(b"[[], [], [], 1]")):  # or written by an earlier version
        file.write_bytes(damaged)
        assert asked().schedule == found.schedule
    monkeypatch.setattr(search_cache, "search", refuse)
    assert asked().schedule == found.schedule


def test_short_searches_and_folders_that_cannot_be_written(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.write_text("a file")
    assert asked().schedule.name == "auto"
    kept.unlink()
    monkeypatch.setattr(search_cache, "WORTH", 60.0)
    asked()
    assert not kept.exists()


def test_measured_costs_are_not_kept(kept: Path) -> None:
    assert cached_search(COSTS, 2, 4, None, "v", 1, 60, 50, keep=False).schedule.name == "auto"
    assert not kept.exists()
