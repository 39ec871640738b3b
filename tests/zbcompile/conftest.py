"""What the runtime's tests share: processes that play the ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpointing import save_program
from tests.support.pool import Pool, open_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for the whole session; see `tests/support/pool.py`."""
    with open_pool() as started:
        yield started


@pytest.fixture(scope="session")
def small_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The model of `tests/support/checkpointing.py` compiled for a schedule and a number of ranks, once."""
    root = tmp_path_factory.mktemp("programs")

    def make(schedule: str, ranks: int) -> Path:
        directory = root / f"{schedule}-{ranks}"
        return directory if directory.exists() else save_program(directory, schedule, ranks)

    return make
